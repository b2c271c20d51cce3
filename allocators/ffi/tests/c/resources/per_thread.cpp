// A second file of the program resources, in which the null stream is that of the calling thread.
#define CUDA_API_PER_THREAD_DEFAULT_STREAM
#include "null_stream.h"

namespace per_thread {

void *null_handle() { return handle_of_null(); }
std::uint64_t pending_bytes() { return pending_after_deallocation_elsewhere(); }

}  // namespace per_thread
