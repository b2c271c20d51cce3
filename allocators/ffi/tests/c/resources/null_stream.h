/* What the two files of the program resources do with the null stream. They differ in whether it is
 * that of the calling thread. */
#ifndef NULL_STREAM_H
#define NULL_STREAM_H

#include "../check.h"
#include "aquifer.hpp"
#include <thread>

namespace {

/* Calls the function of the program, not a copy of it that was compiled into the caller. */
inline void *handle_of_null() {
    void *(*volatile call)(cuda::stream_ref) noexcept = &aquifer::detail::handle_of;
    return call(cuda::stream_ref(cudaStream_t{}));
}

/* Returns what is pending after a thread deallocated a block on the null stream that another thread
 * allocated there: bytes if each thread has a null stream of its own, and otherwise nothing. */
inline std::uint64_t pending_after_deallocation_elsewhere() {
    using resource = aquifer::device_resource;
    void *(resource::*volatile allocate)(cuda::stream_ref, std::size_t, std::size_t) =
        &resource::allocate;
    void (resource::*volatile deallocate)(cuda::stream_ref, void *, std::size_t, std::size_t)
        noexcept = &resource::deallocate;
    const aquifer::runtime rt(simulated(1));
    resource memory(rt, 0);
    void *block = nullptr;
    std::thread([&] { block = (memory.*allocate)(cudaStream_t{}, 100, 256); }).join();
    (memory.*deallocate)(cudaStream_t{}, block, 100, 256);
    return rt.stats(0).pending;
}

}  // namespace

#endif
