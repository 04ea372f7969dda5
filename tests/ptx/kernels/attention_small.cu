// Forward attention in float32 with two stages of cp.async, small enough to read: out = softmax(Q Kᵀ · scale) V.
//
//   thread     scores: row tid/4, BLOCK_K/4 keys;  output: column of its warp's eight, every fourth row
//   loop       K of tile j there · barrier · scores, P → shared · V there · barrier · start tile j+1 · O += P V
// The marks /*bound*/ are where the tests shift a bound by one.
#ifndef HOST                                       // on the host, fibers.h gives these
#define COPY(to, from, bytes) asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: \
    "r"((unsigned)__cvta_generic_to_shared(to)), "l"(from), "r"(bytes))
#define COMMIT() asm volatile("cp.async.commit_group;")
#define WAIT(n) asm volatile("cp.async.wait_group %0;" :: "n"(n))
#endif
#define DIM 32
#define BLOCK_Q 32
#define BLOCK_K 32
#define THREADS 128
#define KEYS (BLOCK_K / 4)                         // keys of a thread
#define ROWS 8                                     // output rows of a thread
#define NEG_INF __int_as_float(0xff800000)

// rows [first, first + 32) of a [len, DIM] array; rows beyond len become zero
__device__ __forceinline__ void load_tile(float (*tile)[DIM], const float* from, int first, int len) {
#pragma unroll 1
  for (int i = threadIdx.x; i < /*bound*/ BLOCK_K * DIM / 4; i += THREADS) {
    const int row = i / (DIM / 4), chunk = i % (DIM / 4);
    const bool in = first + row < /*bound*/ len;
    COPY(&tile[row][chunk * 4], from + (in ? (first + row) * DIM + chunk * 4 : 0), in ? 16 : 0);
  }
  COMMIT();
}

extern "C" __global__ void __launch_bounds__(THREADS) attention(
    const float* __restrict__ q,                   // [len_q, DIM]
    const float* __restrict__ k,                   // [len_k, DIM]
    const float* __restrict__ v,                   // [len_k, DIM]
    float* __restrict__ out,                       // [len_q, DIM]
    const int* __restrict__ list,                  // [tiles]: which tiles of keys, in which order
    int tiles, int len_q, int len_k, float scale) {
  __shared__ __align__(16) float q_smem[BLOCK_Q][DIM], k_smem[2][BLOCK_K][DIM], v_smem[2][BLOCK_K][DIM];
  __shared__ float p_smem[BLOCK_Q][BLOCK_K], shrink_smem[BLOCK_Q], sum_smem[BLOCK_Q];
  const int tid = threadIdx.x, row = tid / 4, part = tid % 4, first_q = blockIdx.x * BLOCK_Q;
  const int dim = tid / 32 * 8 + tid % 8, out_row = tid % 32 / 8;
  float o[ROWS] = {}, row_max = NEG_INF, row_sum = 0.f;

  load_tile(q_smem, q, first_q, len_q);
  int first = list[0] * BLOCK_K;
  load_tile(k_smem[0], k, first, len_k);
  load_tile(v_smem[0], v, first, len_k);
#pragma unroll 1
  for (int j = 0; j < /*bound*/ tiles; j++) {
    const int stage = j & 1, first_k = list[j] * BLOCK_K;
    WAIT(1);                                       // K of this tile (and Q), not yet V
    __syncthreads();
    float s[KEYS], top = row_max;
#pragma unroll
    for (int i = 0; i < KEYS; i++) {
      const int key = part * KEYS + i;
      float sum = 0.f;
#pragma unroll 1
      for (int d = 0; d < /*bound*/ DIM; d++) sum = fmaf(q_smem[row][d], k_smem[stage][key][d], sum);
      s[i] = first_k + key < /*bound*/ len_k ? sum * scale : NEG_INF;
      top = fmaxf(top, s[i]);
    }
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
    const float shrink = exp2f(row_max - top);     // scale holds log2(e)
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < KEYS; i++) {
      const float p = exp2f(s[i] - top);
      p_smem[row][part * KEYS + i] = p;
      sum = sum + p;
    }
    row_max = top;
    row_sum = fmaf(row_sum, shrink, sum);
    if (part == 0) shrink_smem[row] = shrink;
    WAIT(0);                                       // V of this tile
    __syncthreads();
    if (j + 1 < /*bound*/ tiles) {
      first = list[j + 1] * BLOCK_K;
      load_tile(k_smem[stage ^ 1], k, first, len_k);
      load_tile(v_smem[stage ^ 1], v, first, len_k);
    }
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
      const int r = out_row + 4 * i;
      float sum2 = 0.f;
#pragma unroll 1
      for (int key = 0; key < /*bound*/ BLOCK_K; key++) sum2 = fmaf(p_smem[r][key], v_smem[stage][key][dim], sum2);
      o[i] = fmaf(o[i], shrink_smem[r], sum2);
    }
  }
  row_sum = row_sum + __shfl_xor_sync(0xffffffffu, row_sum, 1);
  row_sum = row_sum + __shfl_xor_sync(0xffffffffu, row_sum, 2);
  if (part == 0) sum_smem[row] = row_sum;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < ROWS; i++) {
    const int r = out_row + 4 * i;
    if (first_q + r < /*bound*/ len_q) out[(first_q + r) * DIM + dim] = o[i] / sum_smem[r];
  }
}
