// C = A B by TILE × TILE tiles in shared memory, one thread an element.  k is a multiple of TILE.
// The marks /*bound*/ are where the tests shift a bound by one.
#define TILE 16

extern "C" __global__ void __launch_bounds__(TILE * TILE) matmul(
    const float* __restrict__ a,                   // [m, k]
    const float* __restrict__ b,                   // [k, n]
    float* __restrict__ c,                         // [m, n]
    int m, int n, int k) {
  __shared__ float a_smem[TILE][TILE], b_smem[TILE][TILE];
  const int x = threadIdx.x, y = threadIdx.y, col = blockIdx.x * TILE + x, row = blockIdx.y * TILE + y;
  const int tiles = k / TILE;
  float sum = 0.f;
#pragma unroll 1
  for (int t = 0; t < /*bound*/ tiles; t++) {
    a_smem[y][x] = row < /*bound*/ m ? a[row * k + t * TILE + x] : 0.f;
    b_smem[y][x] = col < /*bound*/ n ? b[(t * TILE + y) * n + col] : 0.f;
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < /*bound*/ TILE; i++) sum = fmaf(a_smem[y][i], b_smem[i][x], sum);
    __syncthreads();
  }
  if (row < /*bound*/ m && col < /*bound*/ n) c[row * n + col] = sum;
}
