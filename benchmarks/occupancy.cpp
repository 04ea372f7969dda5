// Blocks of threads on a multiprocessor, by NVIDIA's own arithmetic: cuda_occupancy.h of the CUDA runtime's wheel.
// A line in: capability major, minor, threads, registers, bytes of shared memory of a multiprocessor and at most of a block,
// then registers and bytes of shared memory of the kernel and threads of a block, and barriers.  A line out: the blocks.
#include <cstddef>
#include <cstdio>
#include <cuda_occupancy.h>

int main()
{
    int major, minor, most_threads, most_registers, registers, threads, barriers;
    unsigned long memory, optin, reserved, shared;
    while (scanf("%d %d %d %d %lu %lu %lu %d %lu %d %d", &major, &minor, &most_threads, &most_registers, &memory, &optin, &reserved,
                 &registers, &shared, &threads, &barriers) == 11) {
        cudaOccDeviceProp device;
        device.computeMajor = major, device.computeMinor = minor;
        device.maxThreadsPerBlock = 1024, device.maxThreadsPerMultiprocessor = most_threads;
        device.regsPerBlock = device.regsPerMultiprocessor = most_registers;
        device.warpSize = 32, device.numSms = 1;
        device.sharedMemPerBlock = 48 << 10, device.sharedMemPerMultiprocessor = memory;
        device.sharedMemPerBlockOptin = optin, device.reservedSharedMemPerBlock = reserved;
        cudaOccFuncAttributes kernel;
        kernel.maxThreadsPerBlock = threads, kernel.numRegs = registers, kernel.sharedSizeBytes = 0;
        kernel.partitionedGCConfig = PARTITIONED_GC_OFF;
        kernel.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN, kernel.maxDynamicSharedSizeBytes = shared;
        kernel.numBlockBarriers = barriers;
        cudaOccDeviceState state;
        state.cacheConfig = CACHE_PREFER_SHARED, state.carveoutConfig = SHAREDMEM_CARVEOUT_MAX_SHARED;
        cudaOccResult found;
        const int failed = cudaOccMaxActiveBlocksPerMultiprocessor(&found, &device, &kernel, &state, threads, shared);
        printf("%d\n", failed ? -failed : found.activeBlocksPerMultiprocessor);
    }
}
