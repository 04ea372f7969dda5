// Forward attention on tensor cores: out = softmax(Q Kᵀ · scale) V, one block a tile of BLOCK_Q queries of one head.
//
//   registers      Q fragments, S = Q Kᵀ (BLOCK_Q × BLOCK_K), O accumulators, row maximum and row sum
//   shared memory  K and V tiles, STAGES of each, rows of DIM bf16 in pages of 64 columns, 16-byte chunks swizzled
//   loop           wait for tile j · barrier · start tile j+1 · S · softmax · O += P V
#include <cuda_bf16.h>

#define NEG_INF __int_as_float(0xff800000)

#ifndef DIM
#define DIM 128
#endif
#define BLOCK_Q 128
#define BLOCK_K 64
#define WARPS 4
#define THREADS (WARPS * 32)
#define MT (BLOCK_Q / WARPS / 16)                  // m16 tiles of a warp
#define PAGES (DIM / 64)
#define TILE_BYTES (BLOCK_K * DIM * 2)

__device__ __forceinline__ unsigned smem_at(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void mma(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void ldmatrix(unsigned (&r)[4], unsigned at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at));
}
__device__ __forceinline__ void ldmatrix_trans(unsigned (&r)[4], unsigned at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at));
}
__device__ __forceinline__ void copy16(unsigned to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "r"(bytes));
}
__device__ __forceinline__ float ex2(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ __forceinline__ unsigned pack(float lo, float hi) {
  unsigned r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo)); return r;
}
// byte offset of the 16-byte chunk (row, chunk) in a tile of `rows` rows
__device__ __forceinline__ unsigned at(int rows, int row, int chunk) {
  return (chunk >> 3) * (rows * 128) + row * 128 + (((chunk & 7) ^ (row & 7)) << 4);
}

// rows of a [len, DIM] array into a swizzled tile; rows beyond `len` become zero
__device__ __forceinline__ void load_tile(unsigned tile, const __nv_bfloat16* from, int first, int len, int rows) {
  for (int i = threadIdx.x; i < rows * (DIM / 8); i += THREADS) {
    const int row = i / (DIM / 8), chunk = i % (DIM / 8);
    const bool in = first + row < len;
    copy16(tile + at(rows, row, chunk), from + (size_t)(in ? first + row : 0) * DIM + chunk * 8, in ? 16 : 0);
  }
  asm volatile("cp.async.commit_group;");
}

extern "C" __global__ void __launch_bounds__(THREADS) attention(
    const __nv_bfloat16* __restrict__ q,           // [heads, len_q, DIM]
    const __nv_bfloat16* __restrict__ k,           // [heads, len_k, DIM]
    const __nv_bfloat16* __restrict__ v,           // [heads, len_k, DIM]
    float* __restrict__ out,                       // [heads, len_q, DIM]
    float* __restrict__ lse,                       // [heads, len_q], natural log
    int len_q, int len_k, float scale) {
  extern __shared__ __align__(128) char smem[];    // K stage 0, K stage 1, V stage 0, V stage 1; Q first lies over K
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.y, first_q = blockIdx.x * BLOCK_Q;
  q += (size_t)head * len_q * DIM; k += (size_t)head * len_k * DIM; v += (size_t)head * len_k * DIM;
  const unsigned k_smem = smem_at(smem), v_smem = k_smem + 2 * TILE_BYTES;

  unsigned q_frag[MT][DIM / 16][4];
  load_tile(k_smem, q, first_q, len_q, BLOCK_Q);
  asm volatile("cp.async.wait_group 0;");
  __syncthreads();
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int c = 0; c < DIM / 16; c++) ldmatrix(q_frag[m][c], k_smem + at(BLOCK_Q, warp * 16 * MT + m * 16 + lane % 16, 2 * c + lane / 16));
  __syncthreads();

  float o[MT][DIM / 8][4] = {}, row_max[MT][2], row_sum[MT][2];
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int h = 0; h < 2; h++) { row_max[m][h] = NEG_INF; row_sum[m][h] = 0.f; }
  const float log2_scale = scale * 1.4426950408889634f;
  const int tiles = (len_k + BLOCK_K - 1) / BLOCK_K;

  load_tile(k_smem, k, 0, len_k, BLOCK_K);
  load_tile(v_smem, v, 0, len_k, BLOCK_K);
#pragma unroll 1
  for (int j = 0; j < tiles; j++) {
    asm volatile("cp.async.wait_group 0;");
    __syncthreads();                               // tile j is there, and nobody reads tile j-1 any more
    const int stage = (j & 1) * TILE_BYTES, next = TILE_BYTES - stage;
    if (j + 1 < tiles) {
      load_tile(k_smem + next, k, (j + 1) * BLOCK_K, len_k, BLOCK_K);
      load_tile(v_smem + next, v, (j + 1) * BLOCK_K, len_k, BLOCK_K);
    }
    float s[MT][BLOCK_K / 8][4] = {};
#pragma unroll
    for (int n = 0; n < BLOCK_K / 8; n++)
#pragma unroll
      for (int c = 0; c < DIM / 32; c++) {
        unsigned b[4];
        ldmatrix(b, k_smem + stage + at(BLOCK_K, n * 8 + lane % 8, 4 * c + lane / 8));
#pragma unroll
        for (int m = 0; m < MT; m++) { mma(s[m][n], q_frag[m][2 * c], b[0], b[1]); mma(s[m][n], q_frag[m][2 * c + 1], b[2], b[3]); }
      }
    if ((j + 1) * BLOCK_K > len_k) {               // keys beyond the end
#pragma unroll
      for (int m = 0; m < MT; m++)
#pragma unroll
        for (int n = 0; n < BLOCK_K / 8; n++)
#pragma unroll
          for (int e = 0; e < 4; e++) if (j * BLOCK_K + n * 8 + 2 * (lane % 4) + (e & 1) >= len_k) s[m][n][e] = NEG_INF;
    }
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        float top = row_max[m][h];
#pragma unroll
        for (int n = 0; n < BLOCK_K / 8; n++) top = fmaxf(top, fmaxf(s[m][n][2 * h], s[m][n][2 * h + 1]));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        const float shrink = ex2((row_max[m][h] - top) * log2_scale), shift = -top * log2_scale;
        row_max[m][h] = top;
        float sum = 0.f;
#pragma unroll
        for (int n = 0; n < BLOCK_K / 8; n++)
#pragma unroll
          for (int e = 0; e < 2; e++) { float p = ex2(fmaf(s[m][n][2 * h + e], log2_scale, shift)); s[m][n][2 * h + e] = p; sum += p; }
        row_sum[m][h] = fmaf(row_sum[m][h], shrink, sum);
#pragma unroll
        for (int d = 0; d < DIM / 8; d++) { o[m][d][2 * h] *= shrink; o[m][d][2 * h + 1] *= shrink; }
      }
#pragma unroll
    for (int c = 0; c < BLOCK_K / 16; c++) {
      unsigned p[MT][4];
#pragma unroll
      for (int m = 0; m < MT; m++) {
        p[m][0] = pack(s[m][2 * c][0], s[m][2 * c][1]); p[m][1] = pack(s[m][2 * c][2], s[m][2 * c][3]);
        p[m][2] = pack(s[m][2 * c + 1][0], s[m][2 * c + 1][1]); p[m][3] = pack(s[m][2 * c + 1][2], s[m][2 * c + 1][3]);
      }
#pragma unroll
      for (int d = 0; d < DIM / 16; d++) {
        unsigned b[4];
        ldmatrix_trans(b, v_smem + stage + at(BLOCK_K, c * 16 + lane % 16, 2 * d + lane / 16));
#pragma unroll
        for (int m = 0; m < MT; m++) { mma(o[m][2 * d], p[m], b[0], b[1]); mma(o[m][2 * d + 1], p[m], b[2], b[3]); }
      }
    }
  }
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float sum = row_sum[m][h];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      const int row = first_q + warp * 16 * MT + m * 16 + h * 8 + lane / 4;
      if (row < len_q) {
        const float inverse = 1.f / sum;
        if (lane % 4 == 0) lse[(size_t)head * len_q + row] = row_max[m][h] * scale + logf(sum);
#pragma unroll
        for (int d = 0; d < DIM / 8; d++)
          *(float2*)(out + ((size_t)head * len_q + row) * DIM + d * 8 + 2 * (lane % 4)) = make_float2(o[m][d][2 * h] * inverse, o[m][d][2 * h + 1] * inverse);
      }
    }
}
