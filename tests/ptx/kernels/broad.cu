// One kernel that makes the compiler use much of PTX: integers of all widths, half types, double functions, switches, calls,
// local arrays, shuffles, votes, atomics.  Its results are compared between toolkits and with NumPy where that is easy.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

__device__ __noinline__ double smooth(double x) { return exp(-x * x) + log1p(fabs(x)) + sin(x) * 0.25 + pow(fabs(x) + 1.0, 0.3); }

__constant__ int weights[8] = {3, 1, 4, 1, 5, 9, 2, 6};

extern "C" __global__ void broad(
    const float* __restrict__ x,                   // [n]
    const int* __restrict__ k,                     // [n]
    double* __restrict__ smooth_out,               // [n]
    float* __restrict__ float_out,                 // [n]
    long long* __restrict__ int_out,               // [n]
    unsigned* __restrict__ histogram,              // [8]
    int n) {
  extern __shared__ int scratch[];                 // [blockDim.x]
  const int i = blockIdx.x * blockDim.x + threadIdx.x, lane = threadIdx.x & 31;
  const bool in = i < n;
  const float v = in ? x[i] : 0.f;
  const int m = in ? k[i] : 1;

  long long a = (long long)m * 0x123456789ll + (m << 7) - (m >> 3);
  a ^= (unsigned long long)a >> 13;
  a = a / (m | 1) + a % ((m & 15) + 2) + __popc(m) + __clz(m) + __brev(m) + __ffs(m) + __mulhi(m, 77777) + (int)__umulhi((unsigned)m, 99u);
  a += __byte_perm(m, ~m, 0x5140) + __funnelshift_l(m, ~m, 5) + min(m, 12) + max((unsigned)m, 9u) + abs(m);
  short s = (short)m; signed char c = (signed char)m; unsigned char u = (unsigned char)(m * 3);
  a += s * 3 + c * 5 + u * 7 + (s >> 2) + weights[m & 7];
  switch (m % 11) {
    case 0: a += 5; break; case 1: a -= 7; break; case 2: a *= 3; break; case 3: a ^= 0x55; break; case 4: a += lane; break;
    case 5: a -= lane; break; case 6: a += 100; break; case 7: a |= 1; break; default: a += 9;
  }
  int table[6];
#pragma unroll 1
  for (int j = 0; j < 6; j++) table[(j + m) % 6 < 0 ? 0 : (j + m) % 6] = j * m;
  a += table[(m * 7 & 0xffff) % 6 * 0 + (m & 3)];

  const __half h = __float2half_rn(v), hh = __hfma(h, __float2half(1.5f), h);
  const __half2 h2 = __hadd2(__floats2half2_rn(v, -v), __half2half2(hh));
  float f = __half2float(hh) + __low2float(h2) * __high2float(h2) + (__hgt(h, hh) ? 1.f : -1.f);
#if __CUDA_ARCH__ >= 800
  const __nv_bfloat162 b2 = __hmul2(__floats2bfloat162_rn(v, 2.f), __floats2bfloat162_rn(3.f, v));
  f += __low2float(b2) - __high2float(b2);
#else
  f += __bfloat162float(__float2bfloat16(v)) * 0.f + __bfloat162float(__float2bfloat16(v * 3.f)) - __bfloat162float(__float2bfloat16(v * 2.f));
#endif
  f += expf(-fabsf(v)) + logf(fabsf(v) + 1.f) + sqrtf(fabsf(v)) + rsqrtf(fabsf(v) + 1.f) + tanhf(v) + v / (fabsf(v) + 2.f) + floorf(v) + rintf(v) + truncf(v * 3.f);
  f += __shfl_xor_sync(0xffffffffu, v, 5) + __shfl_up_sync(0xffffffffu, v, 3) + __shfl_down_sync(0xffffffffu, v, 9, 16) + __shfl_sync(0xffffffffu, v, 7, 8);
  a += __ballot_sync(0xffffffffu, v > 0.f) + __any_sync(0xffffffffu, m == 3) + __all_sync(0xffffffffu, m > -100000);

  scratch[threadIdx.x] = m;
  __syncthreads();
  a += scratch[blockDim.x - 1 - threadIdx.x] + __syncthreads_count(m & 1);
  if (in) {
    smooth_out[i] = smooth(v);
    float_out[i] = f;
    int_out[i] = a;
    atomicAdd(&histogram[(unsigned)m & 7], 1u);
  }
}
