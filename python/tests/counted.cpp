// An allocator for torch.cuda.memory.CUDAPluggableAllocator over cudaMalloc that counts what it has given and got back.
#include <cuda_runtime_api.h>
#include <sys/types.h>

#pragma GCC visibility push(default)
extern "C" {
long counted_given = 0, counted_returned = 0;
// Called under the lock of PyTorch's allocator.
void* counted_alloc(ssize_t size, int, cudaStream_t) {
    void* memory = nullptr;
    if (cudaMalloc(&memory, size) != cudaSuccess) return nullptr;
    ++counted_given;
    return memory;
}
void counted_free(void* memory, ssize_t, int, cudaStream_t) {
    if (cudaFree(memory) == cudaSuccess) ++counted_returned;
}
}
