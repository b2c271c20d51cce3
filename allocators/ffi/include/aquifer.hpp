/* aquifer for C++17: owners, exceptions and allocators over aquifer.h.
 *
 *     aquifer::runtime rt;
 *     aquifer::device_buffer<float> x(rt, 0, values.size(), stream);
 *     x.upload(values, stream);
 *     kernel<<<1, 1, 0, stream>>>(x.data());
 *
 * aquifer.h documents the memory, the streams, the threads and each call that is named here.
 *
 * Errors.     A function that is not `noexcept` throws what its call returns: `out_of_memory`,
 *             which is a std::bad_alloc, or `call_error`, which is a std::runtime_error. Both are
 *             an `aquifer::error`, with the status and the text. Destructors and `noexcept`
 *             functions pass errors to a handler instead: see set_drop_error_handler.
 *
 * Blocking.   A function blocks only if its comment says so.
 *
 * Ownership.  Owners can be moved, but not copied. An owner is empty after it was moved from or
 *             released, and its destructor then does nothing. Runtimes, blocks and transfers may
 *             be destroyed in any order: a block that is live when its runtime is destroyed stays
 *             valid. A stream_registration ends before its stream.
 *
 * CUDA.       The header needs no header of CUDA and links to nothing but the library. Where
 *             <cuda/memory_resource> of libcu++ and <cuda_runtime_api.h> are found,
 *             AQUIFER_CUDA_MR is 1, and device_resource and pinned_resource model cuda::mr's
 *             concepts. Define AQUIFER_CUDA_MR as 0 to leave that out, or as 1 for an error where
 *             it is not possible. libcu++ before 3.1 has its concepts only where
 *             LIBCUDACXX_ENABLE_EXPERIMENTAL_MEMORY_RESOURCE is defined. Files that differ in
 *             this, or in CUDA_API_PER_THREAD_DEFAULT_STREAM, can be linked together, but cannot
 *             pass each other the two resources: those are types of their own in each.
 */
#ifndef AQUIFER_HPP
#define AQUIFER_HPP

#include "aquifer.h"

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <atomic>
#include <exception>
#include <iterator>
#include <limits>
#include <new>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#if __has_include(<memory_resource>)
#include <memory_resource>
#endif

#ifndef AQUIFER_CUDA_MR
#if __has_include(<cuda/memory_resource>) && __has_include(<cuda_runtime_api.h>)
#include <cuda/memory_resource>
#if (!defined(CCCL_VERSION) || CCCL_VERSION < 3001000) && \
    !defined(LIBCUDACXX_ENABLE_EXPERIMENTAL_MEMORY_RESOURCE)
#define AQUIFER_CUDA_MR 0
#else
#define AQUIFER_CUDA_MR 1
#endif
#else
#define AQUIFER_CUDA_MR 0
#endif
#elif AQUIFER_CUDA_MR
#if !__has_include(<cuda/memory_resource>) || !__has_include(<cuda_runtime_api.h>)
#error "AQUIFER_CUDA_MR is 1, but <cuda/memory_resource> and <cuda_runtime_api.h> are not found"
#else
#include <cuda/memory_resource>
#if (!defined(CCCL_VERSION) || CCCL_VERSION < 3001000) && \
    !defined(LIBCUDACXX_ENABLE_EXPERIMENTAL_MEMORY_RESOURCE)
#error "AQUIFER_CUDA_MR is 1, but libcu++ before 3.1 has no concepts of memory resources"
#endif
#endif
#endif

/* What depends on the settings above and on CUDA_API_PER_THREAD_DEFAULT_STREAM is in an inline
 * namespace, so that files with different settings can be linked together. */
#if !AQUIFER_CUDA_MR
#define AQUIFER_CONFIGURATION plain
#elif defined(CUDA_API_PER_THREAD_DEFAULT_STREAM) || defined(__CUDA_API_PER_THREAD_DEFAULT_STREAM)
#define AQUIFER_CONFIGURATION mr_per_thread
#else
#define AQUIFER_CONFIGURATION mr_legacy
#endif

namespace aquifer {

/* ---- Errors --------------------------------------------------------------------------------- */

/* The base of this header's exceptions: a status and its text. */
class error {
public:
    virtual ~error() = default;

    /* Returns the status, never AQ_OK. */
    aq_status status() const noexcept { return status_; }

    /* Returns the text of aq_last_error, or the name of the status if there is no text. */
    virtual const char *what() const noexcept = 0;

protected:
    error(aq_status status, const char *text) : status_(status), text_(text) {}
    error(const error &) = default;
    error &operator=(const error &) = default;

    const char *text() const noexcept { return text_.what(); }

private:
    aq_status status_;
    /* A text whose copy does not throw. */
    std::runtime_error text_;
};

/* Not enough memory, or a limit was reached: AQ_ERROR_OUT_OF_MEMORY, _OUT_OF_BUDGET, _TOO_LARGE. */
class out_of_memory final : public std::bad_alloc, public error {
public:
    out_of_memory(aq_status status, const char *text) : error(status, text) {}
    const char *what() const noexcept override { return text(); }
};

/* Any other status. */
class call_error final : public std::runtime_error, public error {
public:
    call_error(aq_status status, const char *text)
        : std::runtime_error(text), error(status, text) {}
    const char *what() const noexcept override { return text(); }
};

/* Throws `out_of_memory` or `call_error`, as the status says. */
[[noreturn]] inline void throw_error(aq_status status, const char *text) {
    switch (status) {
        case AQ_ERROR_OUT_OF_MEMORY:
        case AQ_ERROR_OUT_OF_BUDGET:
        case AQ_ERROR_TOO_LARGE:
            throw out_of_memory(status, text);
        default:
            throw call_error(status, text);
    }
}

/* Throws unless `status`, of the calling thread's last call, is AQ_OK. */
inline void check(aq_status status) {
    if (status != AQ_OK) {
        const char *text = status == AQ_NOT_READY ? "" : aq_last_error();
        throw_error(status, text[0] != 0 ? text : aq_status_name(status));
    }
}

/* Receives errors of destructors and of `noexcept` functions: the function of aquifer.h that
 * failed, the status and its text. What it could not free stays allocated. */
using drop_error_handler = void (*)(const char *call, aq_status status,
                                    const char *text) noexcept;

namespace detail {

/* Writes a line to the standard error. */
inline void print_drop_error(const char *call, aq_status status, const char *text) noexcept {
    std::fprintf(stderr, "aquifer: %s: %s: %s\n", call, aq_status_name(status), text);
}

inline std::atomic<drop_error_handler> on_drop_error{&print_drop_error};

inline void check_dropped(const char *call, aq_status status) noexcept {
    if (status != AQ_OK) {
        on_drop_error.load(std::memory_order_acquire)(call, status, aq_last_error());
    }
}

/* A value that is ended once, by `Deleter::end`, unless it is `Deleter::empty`. */
template <class T, class Deleter>
class owned {
public:
    owned() noexcept = default;
    explicit owned(T value) noexcept : value_(value) {}
    owned(owned &&other) noexcept : value_(other.release()) {}
    owned &operator=(owned &&other) noexcept {
        if (this != &other) {
            reset();
            value_ = other.release();
        }
        return *this;
    }
    owned(const owned &) = delete;
    owned &operator=(const owned &) = delete;
    ~owned() { reset(); }

    const T &value() const noexcept { return value_; }
    bool is_empty() const noexcept { return Deleter::empty(value_); }
    T release() noexcept { return std::exchange(value_, T{}); }
    void reset() noexcept {
        if (!is_empty()) Deleter::end(release());
    }

private:
    T value_{};
};

/* Returns the bytes of `count` values, or throws std::bad_array_new_length. */
template <class T>
std::size_t bytes_of(std::size_t count) {
    if (count > std::numeric_limits<std::size_t>::max() / sizeof(T)) {
        throw std::bad_array_new_length();
    }
    return count * sizeof(T);
}

}  // namespace detail

/* Sets the handler of the process and returns the one before. The first handler writes a line to
 * the standard error, and so does null. With hidden visibility each shared object has a handler of
 * its own. */
inline drop_error_handler set_drop_error_handler(drop_error_handler handler) noexcept {
    return detail::on_drop_error.exchange(handler != nullptr ? handler : &detail::print_drop_error,
                                          std::memory_order_acq_rel);
}

/* ---- Texts ---------------------------------------------------------------------------------- */

/* Owns a text that a function of aquifer.h returned, and frees it by aq_text_free. */
class text {
public:
    text() noexcept = default;
    explicit text(char *owned) noexcept : text_(owned) {}

    const char *get() const noexcept { return text_.value(); }
    [[nodiscard]] char *release() noexcept { return text_.release(); }
    void reset() noexcept { text_.reset(); }

private:
    struct text_deleter {
        static bool empty(const char *value) noexcept { return value == nullptr; }
        static void end(char *value) noexcept { aq_text_free(value); }
    };
    detail::owned<char *, text_deleter> text_;
};

/* ---- Runtimes ------------------------------------------------------------------------------- */

/* The driver's handle of a stream, as in aquifer.h: CUstream, cudaStream_t, or null. */
using stream_handle = void *;

/* Returns options with their size set, and everything else as the default. */
inline aq_runtime_options default_options() noexcept {
    aq_runtime_options options{};
    options.size = sizeof options;
    return options;
}

/* A limit, and the bytes that are held under it. */
struct limit_and_used {
    std::uint64_t limit;
    std::uint64_t used;
};

namespace detail {

/* The calls that runtime_view and runtime share: `Self` returns the number by get(). */
template <class Self>
class runtime_calls {
public:
    /* Call aq_device_count and aq_device. */
    std::uint32_t device_count() const {
        std::uint32_t count = 0;
        check(aq_device_count(number(), &count));
        return count;
    }
    aq_device_facts device(std::uint32_t device) const {
        aq_device_facts facts{};
        facts.size = sizeof facts;
        check(aq_device(number(), device, &facts));
        return facts;
    }

    /* Call aq_device_stats, aq_pinned_stats and aq_reset_peaks. */
    aq_stats stats(std::uint32_t device) const {
        aq_stats stats{};
        stats.size = sizeof stats;
        check(aq_device_stats(number(), device, &stats));
        return stats;
    }
    aq_stats pinned_stats(std::uint32_t device) const {
        aq_stats stats{};
        stats.size = sizeof stats;
        check(aq_pinned_stats(number(), device, &stats));
        return stats;
    }
    void reset_peaks(std::uint32_t device) const { check(aq_reset_peaks(number(), device)); }

    /* Call aq_limit, aq_set_limit, aq_pinned_limit and aq_set_pinned_limit. Setting a limit
     * returns the held bytes above it. */
    limit_and_used limit(std::uint32_t device) const {
        limit_and_used found{};
        check(aq_limit(number(), device, &found.limit, &found.used));
        return found;
    }
    std::uint64_t set_limit(std::uint32_t device, std::uint64_t limit) const {
        std::uint64_t excess = 0;
        check(aq_set_limit(number(), device, limit, &excess));
        return excess;
    }
    limit_and_used pinned_limit() const {
        limit_and_used found{};
        check(aq_pinned_limit(number(), &found.limit, &found.used));
        return found;
    }
    std::uint64_t set_pinned_limit(std::uint64_t limit) const {
        std::uint64_t excess = 0;
        check(aq_set_pinned_limit(number(), limit, &excess));
        return excess;
    }

    /* Call aq_trim and aq_pinned_trim, and return the number of released bytes. The second blocks
     * until the devices are idle. */
    std::uint64_t trim(std::uint32_t device, std::uint64_t keep = 0) const {
        std::uint64_t given = 0;
        check(aq_trim(number(), device, keep, &given));
        return given;
    }
    std::uint64_t pinned_trim(std::uint32_t device, std::uint64_t keep = 0) const {
        std::uint64_t given = 0;
        check(aq_pinned_trim(number(), device, keep, &given));
        return given;
    }

    /* Calls aq_snapshot and returns the JSON object. */
    std::string snapshot() const {
        char *json = nullptr;
        check(aq_snapshot(number(), &json));
        const text owned(json);
        return owned.get();
    }

    /* Calls aq_memory_snapshot. Blocks while it writes the file. */
    void memory_snapshot(std::uint32_t device, const char *path) const {
        check(aq_memory_snapshot(number(), device, path));
    }

private:
    friend Self;
    runtime_calls() noexcept = default;

    aq_runtime number() const noexcept { return static_cast<const Self &>(*this).get(); }
};

}  // namespace detail

/* A runtime that something else owns. It is a number: a copy costs nothing, and calls for a runtime
 * that was destroyed throw call_error with AQ_ERROR_CLOSED. */
class runtime_view : public detail::runtime_calls<runtime_view> {
public:
    runtime_view() noexcept = default;
    /* Not explicit, so that runtimes of aquifer.h can be passed for it. No other type of number
     * can. */
    template <class Number, class = std::enable_if_t<std::is_same_v<Number, aq_runtime>>>
    runtime_view(Number number) noexcept : number_(number) {}

    aq_runtime get() const noexcept { return number_; }
    explicit operator bool() const noexcept { return number_ != 0; }

private:
    aq_runtime number_ = 0;
};

inline bool operator==(runtime_view a, runtime_view b) noexcept { return a.get() == b.get(); }
inline bool operator!=(runtime_view a, runtime_view b) noexcept { return !(a == b); }

/* Owns a runtime: aq_runtime_create and aq_runtime_destroy, which may block for as long as the
 * driver takes. Blocks that are live then stay valid until they are freed. A `runtime` can be
 * passed where a runtime_view is expected, which does not keep it open. */
class runtime : public detail::runtime_calls<runtime> {
public:
    runtime() : runtime(default_options()) {}
    explicit runtime(const aq_runtime_options &options) {
        check(aq_runtime_create(&options, &number_));
    }
    /* Takes over a runtime. */
    static runtime adopt(aq_runtime number) noexcept { return runtime(owned_number{number}); }

    runtime(runtime &&other) noexcept : number_(other.release()) {}
    runtime &operator=(runtime &&other) noexcept {
        if (this != &other) {
            reset();
            number_ = other.release();
        }
        return *this;
    }
    runtime(const runtime &) = delete;
    runtime &operator=(const runtime &) = delete;
    ~runtime() { reset(); }

    aq_runtime get() const noexcept { return number_; }
    explicit operator bool() const noexcept { return number_ != 0; }
    operator runtime_view() const noexcept { return runtime_view(number_); }

    [[nodiscard]] aq_runtime release() noexcept { return std::exchange(number_, 0); }
    void reset() noexcept {
        if (const aq_runtime number = release()) {
            detail::check_dropped("aq_runtime_destroy", aq_runtime_destroy(number));
        }
    }

private:
    struct owned_number {
        aq_runtime number;
    };
    explicit runtime(owned_number owned) noexcept : number_(owned.number) {}

    aq_runtime number_ = 0;
};

/* ---- Staging -------------------------------------------------------------------------------- */

/* Owns the ticket of a transfer that aq_upload_begin or aq_download_begin began. The host memory
 * must stay allocated and must not be used until wait() or poll() has reported the end, or the
 * transfer is destroyed. The destructor calls aq_ticket_free: a pending copy is cancelled and
 * waited for, which blocks for about one chunk of it. */
class transfer {
public:
    transfer() noexcept = default;
    explicit transfer(aq_ticket ticket) noexcept : ticket_(ticket) {}

    aq_ticket get() const noexcept { return ticket_.value(); }
    [[nodiscard]] aq_ticket release() noexcept { return ticket_.release(); }
    void reset() noexcept { ticket_.reset(); }
    explicit operator bool() const noexcept { return !ticket_.is_empty(); }

    /* Calls aq_ticket_poll and returns whether the copy is complete. Throws the error that ended
     * it. */
    bool poll() const {
        const aq_status status = aq_ticket_poll(get());
        if (status != AQ_NOT_READY) check(status);
        return status == AQ_OK;
    }

    /* Calls aq_ticket_wait. Blocks until the copy has ended. Throws the error that ended it. */
    void wait() const { check(aq_ticket_wait(get())); }

private:
    struct ticket_deleter {
        static bool empty(aq_ticket value) noexcept { return value == 0; }
        static void end(aq_ticket value) noexcept {
            detail::check_dropped("aq_ticket_free", aq_ticket_free(value));
        }
    };
    detail::owned<aq_ticket, ticket_deleter> ticket_;
};

/* ---- Device memory -------------------------------------------------------------------------- */

/* Owns a block of device memory: aq_alloc and aq_free. Its destructor frees it in the order of the
 * stream that it was allocated for, and never waits. Uses by other streams must have been recorded
 * (record_use). Free it before that stream is destroyed, unless the stream is registered and is
 * retired before. */
class device_block {
public:
    device_block() noexcept = default;

    /* Calls aq_alloc, or aq_alloc_aligned for an alignment. Blocks only if memory in use must
     * become free first. */
    device_block(runtime_view runtime, std::uint32_t device, std::uint64_t bytes,
                 stream_handle stream, std::uint64_t align = 0) {
        std::uint64_t address = 0;
        check(align == 0 ? aq_alloc(runtime.get(), device, bytes, stream, &address)
                         : aq_alloc_aligned(runtime.get(), device, bytes, align, stream, &address));
        block_ = owned_block(block_record{runtime.get(), device, address, bytes});
    }

    /* Takes over a block, whose size aq_block_size returns. */
    static device_block adopt(runtime_view runtime, std::uint32_t device, std::uint64_t address) {
        std::uint64_t bytes = 0;
        check(aq_block_size(runtime.get(), device, address, &bytes, nullptr));
        device_block block;
        block.block_ = owned_block(block_record{runtime.get(), device, address, bytes});
        return block;
    }

    std::uint64_t get() const noexcept { return block_.value().address; }
    void *data() const noexcept { return reinterpret_cast<void *>(get()); }
    /* Returns the requested size. */
    std::uint64_t size() const noexcept { return block_.value().bytes; }
    runtime_view runtime() const noexcept { return block_.value().runtime; }
    std::uint32_t device() const noexcept { return block_.value().device; }
    explicit operator bool() const noexcept { return !block_.is_empty(); }

    [[nodiscard]] std::uint64_t release() noexcept { return block_.release().address; }
    void reset() noexcept { block_.reset(); }

    /* Calls aq_free, and throws where the destructor would not. After an error the block is still
     * owned. */
    void free() {
        check(aq_free(block_.value().runtime, device(), get()));
        block_.release();
    }

    /* Calls aq_free_on: `stream` has read and written the block. */
    void free_on(stream_handle stream) {
        check(aq_free_on(block_.value().runtime, device(), get(), stream));
        block_.release();
    }

    /* Calls aq_record_use. */
    void record_use(stream_handle stream, std::uint32_t access = AQ_READ | AQ_WRITE) const {
        check(aq_record_use(block_.value().runtime, device(), get(), stream, access));
    }

    /* Call aq_upload and aq_download, from `offset` bytes on. Block until the copy is complete. */
    void upload(const void *host, std::uint64_t bytes, stream_handle stream,
                std::uint64_t offset = 0) const {
        check(aq_upload(block_.value().runtime, device(), get(), offset, host, bytes, stream));
    }
    void download(void *host, std::uint64_t bytes, stream_handle stream,
                  std::uint64_t offset = 0) const {
        check(aq_download(block_.value().runtime, device(), get(), offset, host, bytes, stream));
    }

    /* Call aq_upload_begin and aq_download_begin. Block while the maximum number of transfers is
     * pending. See `transfer` for how long the host memory is in use. */
    [[nodiscard]] transfer upload_begin(const void *host, std::uint64_t bytes, stream_handle stream,
                                        std::uint64_t offset = 0) const {
        aq_ticket ticket = 0;
        check(aq_upload_begin(block_.value().runtime, device(), get(), offset, host, bytes, stream,
                              &ticket));
        return transfer(ticket);
    }
    [[nodiscard]] transfer download_begin(void *host, std::uint64_t bytes, stream_handle stream,
                                          std::uint64_t offset = 0) const {
        aq_ticket ticket = 0;
        check(aq_download_begin(block_.value().runtime, device(), get(), offset, host, bytes,
                                stream, &ticket));
        return transfer(ticket);
    }

private:
    struct block_record {
        aq_runtime runtime;
        std::uint32_t device;
        std::uint64_t address;
        std::uint64_t bytes;
    };
    struct block_deleter {
        static bool empty(const block_record &value) noexcept { return value.address == 0; }
        static void end(const block_record &value) noexcept {
            detail::check_dropped("aq_free", aq_free(value.runtime, value.device, value.address));
        }
    };
    using owned_block = detail::owned<block_record, block_deleter>;
    owned_block block_;
};

/* Owns a block of `count` values of a trivially copyable type: a device_block with a type. The
 * values are not initialized. */
template <class T>
class device_buffer {
    static_assert(std::is_trivially_copyable_v<T>, "its values are copied as bytes");

public:
    using value_type = T;

    device_buffer() noexcept = default;

    /* Allocates as device_block, aligned for T. Throws std::bad_array_new_length if the values
     * have more bytes than a size_t can count. */
    device_buffer(runtime_view runtime, std::uint32_t device, std::size_t count,
                  stream_handle stream)
        : block_(runtime, device, detail::bytes_of<T>(count), stream,
                 alignof(T) > 512 ? alignof(T) : 0) {}

    T *data() const noexcept { return static_cast<T *>(block_.data()); }
    T *get() const noexcept { return data(); }
    std::size_t size() const noexcept {
        return static_cast<std::size_t>(block_.size()) / sizeof(T);
    }
    explicit operator bool() const noexcept { return static_cast<bool>(block_); }

    /* Returns the block, for record_use, free_on and transfers that do not block. */
    device_block &block() noexcept { return block_; }
    const device_block &block() const noexcept { return block_; }
    [[nodiscard]] T *release() noexcept { return reinterpret_cast<T *>(block_.release()); }
    void reset() noexcept { block_.reset(); }

    /* Call aq_upload and aq_download for `count` values, from the value `first` on. Block until
     * the copy is complete. */
    void upload(const T *host, std::size_t count, stream_handle stream,
                std::size_t first = 0) const {
        block_.upload(host, detail::bytes_of<T>(count), stream, detail::bytes_of<T>(first));
    }
    void download(T *host, std::size_t count, stream_handle stream, std::size_t first = 0) const {
        block_.download(host, detail::bytes_of<T>(count), stream, detail::bytes_of<T>(first));
    }

    /* The same for all values of a contiguous container of T, such as std::vector<T>. */
    template <class Container,
              class Data = decltype(std::data(std::declval<const Container &>())),
              class = std::enable_if_t<std::is_same_v<const T *, Data> ||
                                       std::is_same_v<T *, Data>>>
    void upload(const Container &host, stream_handle stream) const {
        upload(std::data(host), std::size(host), stream);
    }
    template <class Container, class Data = decltype(std::data(std::declval<Container &>())),
              class = std::enable_if_t<std::is_same_v<Data, T *>>>
    void download(Container &host, stream_handle stream) const {
        download(std::data(host), std::size(host), stream);
    }

private:
    device_block block_;
};

/* ---- Streams -------------------------------------------------------------------------------- */

/* Keeps a stream registered: aq_stream_register, which blocks for a stream that was used before,
 * and aq_stream_retire in the destructor, which blocks until the work queued there is complete.
 * End it before the stream is destroyed. Free the stream's blocks before the runtime or the stream
 * is destroyed. */
class stream_registration {
public:
    stream_registration() noexcept = default;
    stream_registration(runtime_view runtime, std::uint32_t device, stream_handle stream) {
        check(aq_stream_register(runtime.get(), device, stream));
        registration_ = owned_registration(registration_record{runtime.get(), device, stream});
    }

    stream_handle get() const noexcept { return registration_.value().stream; }
    explicit operator bool() const noexcept { return !registration_.is_empty(); }
    /* Leaves the stream registered: retire it by aq_stream_retire. */
    [[nodiscard]] stream_handle release() noexcept { return registration_.release().stream; }
    void reset() noexcept { registration_.reset(); }

    /* Calls aq_stream_retire, and throws where the destructor would not. */
    void retire() {
        check(aq_stream_retire(registration_.value().runtime, registration_.value().device, get()));
        registration_.release();
    }

private:
    struct registration_record {
        aq_runtime runtime;
        std::uint32_t device;
        stream_handle stream;
    };
    struct registration_deleter {
        static bool empty(const registration_record &value) noexcept { return value.runtime == 0; }
        static void end(const registration_record &value) noexcept {
            const aq_status status = aq_stream_retire(value.runtime, value.device, value.stream);
            /* A destroyed runtime no longer uses the stream. */
            if (status != AQ_ERROR_CLOSED) detail::check_dropped("aq_stream_retire", status);
        }
    };
    using owned_registration = detail::owned<registration_record, registration_deleter>;
    owned_registration registration_;
};

/* ---- Pinned host memory --------------------------------------------------------------------- */

/* Owns a block of pinned host memory: aq_pinned_alloc, which blocks while the pool grows, and
 * aq_pinned_free. Queued copies that still use it must have been recorded (record_use) or waited
 * for. Not zeroed. */
class pinned_block {
public:
    pinned_block() noexcept = default;
    pinned_block(runtime_view runtime, std::uint32_t device, std::uint64_t bytes,
                 std::uint64_t align = 0) {
        void *memory = nullptr;
        check(aq_pinned_alloc(runtime.get(), device, bytes, align, &memory));
        memory_ = owned_memory(memory_record{memory, static_cast<std::size_t>(bytes)});
    }

    void *get() const noexcept { return memory_.value().memory; }
    void *data() const noexcept { return get(); }
    std::size_t size() const noexcept { return memory_.value().bytes; }
    explicit operator bool() const noexcept { return !memory_.is_empty(); }
    [[nodiscard]] void *release() noexcept { return memory_.release().memory; }
    void reset() noexcept { memory_.reset(); }

    /* Calls aq_pinned_is_pinned. */
    bool is_pinned() const {
        int pinned = 0;
        check(aq_pinned_is_pinned(get(), &pinned));
        return pinned != 0;
    }

    /* Calls aq_pinned_record_use. */
    void record_use(runtime_view runtime, std::uint32_t device, stream_handle stream) const {
        check(aq_pinned_record_use(get(), runtime.get(), device, stream));
    }

private:
    struct memory_record {
        void *memory;
        std::size_t bytes;
    };
    struct memory_deleter {
        static bool empty(const memory_record &value) noexcept { return value.memory == nullptr; }
        static void end(const memory_record &value) noexcept {
            detail::check_dropped("aq_pinned_free", aq_pinned_free(value.memory));
        }
    };
    using owned_memory = detail::owned<memory_record, memory_deleter>;
    owned_memory memory_;
};

/* ---- Memory resources ----------------------------------------------------------------------- */

namespace detail {

/* Throws call_error with AQ_ERROR_BAD_ALIGNMENT unless `align` is a power of two. */
inline void check_alignment(std::size_t align) {
    if (align == 0 || (align & (align - 1)) != 0) {
        throw_error(AQ_ERROR_BAD_ALIGNMENT, "the alignment is not a power of two");
    }
}

/* Allocates pinned memory for a container. It need not be accessible to devices. A size of zero
 * gets a block of its own. */
inline void *allocate_pinned(runtime_view runtime, std::uint32_t device, std::size_t bytes,
                             std::size_t align) {
    check_alignment(align);
    void *memory = nullptr;
    check(aq_pinned_alloc(runtime.get(), device, bytes == 0 ? 1 : bytes, align < 64 ? 64 : align,
                          &memory));
    return memory;
}

inline void free_pinned(void *memory) noexcept {
    check_dropped("aq_pinned_free", aq_pinned_free(memory));
}

inline namespace AQUIFER_CONFIGURATION {

#if AQUIFER_CUDA_MR
/* Returns the handle of a stream. Null is handle 2 where per-thread default streams are enabled. */
inline stream_handle handle_of(cuda::stream_ref stream) noexcept {
    const auto handle = stream.get();
#if defined(CUDA_API_PER_THREAD_DEFAULT_STREAM) || defined(__CUDA_API_PER_THREAD_DEFAULT_STREAM)
    if (handle == nullptr) return reinterpret_cast<stream_handle>(std::uintptr_t{2});
#endif
    return handle;
}
#endif

/* What device_resource and pinned_resource share: for `Resource`, the names that cuda::mr's
 * concepts call. libcu++ from 3.1 on calls allocate(stream, bytes, alignment) and allocate_sync.
 * Versions before call allocate_async(bytes, alignment, stream) and allocate(bytes, alignment).
 *
 * deallocate and deallocate_async call deallocate_on: a block of a device_resource must be
 * deallocated before the stream that it was allocated for is destroyed, unless that stream is
 * registered and is retired before. The deallocation may name another stream, which does not
 * replace this. */
template <class Resource>
class resource_names {
#if AQUIFER_CUDA_MR
public:
    void *allocate(cuda::stream_ref stream, std::size_t bytes, std::size_t align = 256) {
        return self().allocate_on(handle_of(stream), bytes, align);
    }
    void deallocate(cuda::stream_ref stream, void *memory, std::size_t bytes,
                    std::size_t = 256) noexcept {
        self().deallocate_on(handle_of(stream), memory, bytes);
    }
    void *allocate_async(std::size_t bytes, std::size_t align, cuda::stream_ref stream) {
        return self().allocate_on(handle_of(stream), bytes, align);
    }
    void *allocate_async(std::size_t bytes, cuda::stream_ref stream) {
        return self().allocate_on(handle_of(stream), bytes, 256);
    }
    void deallocate_async(void *memory, std::size_t bytes, std::size_t,
                          cuda::stream_ref stream) noexcept {
        self().deallocate_on(handle_of(stream), memory, bytes);
    }
    void deallocate_async(void *memory, std::size_t bytes, cuda::stream_ref stream) noexcept {
        self().deallocate_on(handle_of(stream), memory, bytes);
    }
    void *allocate(std::size_t bytes, std::size_t align = 256) {
        return self().allocate_sync(bytes, align);
    }
    void deallocate(void *memory, std::size_t bytes, std::size_t align = 256) noexcept {
        self().deallocate_sync(memory, bytes, align);
    }
#endif

protected:
    resource_names(runtime_view runtime, std::uint32_t device) noexcept
        : runtime_(runtime), device_(device) {}

    runtime_view runtime_;
    std::uint32_t device_;

private:
    Resource &self() noexcept { return static_cast<Resource &>(*this); }

    friend bool operator==(const Resource &a, const Resource &b) noexcept {
        return a.runtime_ == b.runtime_ && a.device_ == b.device_;
    }
    friend bool operator!=(const Resource &a, const Resource &b) noexcept { return !(a == b); }
};

}  // namespace AQUIFER_CONFIGURATION
}  // namespace detail

inline namespace AQUIFER_CONFIGURATION {

/* Device memory of a runtime as a memory resource. Models cuda::mr::resource_with<...,
 * cuda::mr::device_accessible>, and the concepts of libcu++ before 3.1, so RMM and libcu++'s
 * containers can allocate from it. It is two numbers: copies are equal, and do not keep the runtime
 * open, which should outlive what allocates from it. Streams must be streams of the device.
 *
 * Blocks must be deallocated before the stream that they were allocated for is destroyed, unless
 * that stream is registered (aq_stream_register) and is retired before.
 *
 * A size of zero gets null. Alignments are powers of two up to 2 MiB: others throw
 * AQ_ERROR_BAD_ALIGNMENT, for a size of zero too. */
class device_resource : public detail::resource_names<device_resource> {
public:
    device_resource(runtime_view runtime, std::uint32_t device) noexcept
        : resource_names(runtime, device) {}

    runtime_view runtime() const noexcept { return runtime_; }
    std::uint32_t device() const noexcept { return device_; }

    /* Calls aq_alloc or aq_alloc_aligned: memory for work queued on `stream` from now on. Blocks
     * only if memory in use must become free first. */
    void *allocate_on(stream_handle stream, std::size_t bytes, std::size_t align = 256) {
        detail::check_alignment(align);
        if (bytes == 0) return nullptr;
        std::uint64_t address = 0;
        check(align <= 512
                  ? aq_alloc(runtime_.get(), device_, bytes, stream, &address)
                  : aq_alloc_aligned(runtime_.get(), device_, bytes, align, stream, &address));
        return reinterpret_cast<void *>(address);
    }

    /* Calls aq_free_on: the block is reused only after the work queued so far on `stream`, which
     * need not be the one that it was allocated for. That one must still exist, unless it was
     * registered and retired. For a runtime that was destroyed calls aq_free, so other streams must
     * be idle then. Does not block. While `stream` captures a graph, or if its use cannot be
     * recorded, the block stays allocated, and the handler of set_drop_error_handler gets the
     * error. */
    void deallocate_on(stream_handle stream, void *memory, std::size_t = 0) noexcept {
        const auto address = static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(memory));
        const aq_status status = aq_free_on(runtime_.get(), device_, address, stream);
        if (status == AQ_ERROR_CLOSED) {
            detail::check_dropped("aq_free", aq_free(runtime_.get(), device_, address));
        } else {
            detail::check_dropped("aq_free_on", status);
        }
    }

    /* Allocates memory that any stream may use at once. Blocks until the work queued so far on the
     * device's default stream is complete: aq_upload of one byte, which waits for it and for what
     * the memory was used for before. Throws call_error with AQ_ERROR_CAPTURING while the legacy
     * default stream cannot be used because of a capture. */
    void *allocate_sync(std::size_t bytes, std::size_t align = 256) {
        detail::check_alignment(align);
        if (bytes == 0) return nullptr;
        device_block block(runtime_, device_, bytes, nullptr, align > 512 ? align : 0);
        const char byte = 0;
        block.upload(&byte, sizeof byte, nullptr);
        return reinterpret_cast<void *>(block.release());
    }

    /* Calls aq_free. All work that uses the memory must be complete. Does not block. */
    void deallocate_sync(void *memory, std::size_t = 0, std::size_t = 256) noexcept {
        const auto address = static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(memory));
        detail::check_dropped("aq_free", aq_free(runtime_.get(), device_, address));
    }

#if AQUIFER_CUDA_MR
    friend constexpr void get_property(const device_resource &,
                                       cuda::mr::device_accessible) noexcept {}
#if defined(CCCL_VERSION) && CCCL_VERSION >= 3002000
    using default_queries = cuda::mr::properties_list<cuda::mr::device_accessible>;
#endif
#endif
};

/* Pinned host memory of a runtime, near a device, as a memory resource. Models
 * cuda::mr::resource_with<..., cuda::mr::host_accessible, cuda::mr::device_accessible>, otherwise
 * like device_resource. Allocations block while the pool grows. Memory that cannot be pinned, which
 * devices could not access, is refused by AQ_ERROR_UNSUPPORTED. */
class pinned_resource : public detail::resource_names<pinned_resource> {
public:
    pinned_resource(runtime_view runtime, std::uint32_t device) noexcept
        : resource_names(runtime, device) {}

    runtime_view runtime() const noexcept { return runtime_; }
    std::uint32_t device() const noexcept { return device_; }

    /* Calls aq_pinned_alloc and aq_pinned_is_pinned. */
    void *allocate_sync(std::size_t bytes, std::size_t align = 64) {
        detail::check_alignment(align);
        if (bytes == 0) return nullptr;
        pinned_block block(runtime_, device_, bytes, align < 64 ? 64 : align);
        if (!block.is_pinned()) {
            throw_error(AQ_ERROR_UNSUPPORTED, "the host memory cannot be pinned");
        }
        return block.release();
    }

    /* Calls aq_pinned_free. All work that uses the memory must be complete. */
    void deallocate_sync(void *memory, std::size_t = 0, std::size_t = 64) noexcept {
        detail::free_pinned(memory);
    }

    /* The memory is usable at once, on the host and on any stream. */
    void *allocate_on(stream_handle, std::size_t bytes, std::size_t align = 64) {
        return allocate_sync(bytes, align);
    }

    /* Calls aq_pinned_record_use and aq_pinned_free: the memory is reused only after the work
     * queued so far on `stream`. For a runtime that was destroyed the stream must be idle. If the
     * use cannot be recorded, as during a capture, the block stays allocated, and the handler of
     * set_drop_error_handler gets the error. */
    void deallocate_on(stream_handle stream, void *memory, std::size_t = 0) noexcept {
        if (memory == nullptr) return;
        const aq_status status =
            aq_pinned_record_use(memory, runtime_.get(), device_, stream);
        if (status == AQ_OK || status == AQ_ERROR_CLOSED) {
            detail::free_pinned(memory);
        } else {
            detail::check_dropped("aq_pinned_record_use", status);
        }
    }

#if AQUIFER_CUDA_MR
    friend constexpr void get_property(const pinned_resource &,
                                       cuda::mr::device_accessible) noexcept {}
    friend constexpr void get_property(const pinned_resource &,
                                       cuda::mr::host_accessible) noexcept {}
#if defined(CCCL_VERSION) && CCCL_VERSION >= 3002000
    using default_queries =
        cuda::mr::properties_list<cuda::mr::device_accessible, cuda::mr::host_accessible>;
#endif
#endif
};

/* `Resource`, with `OutOfMemory` thrown instead of out_of_memory, constructed from its text. RMM's
 * adaptors retry or report what they catch as rmm::out_of_memory:
 *
 *     aquifer::throwing<aquifer::device_resource, rmm::out_of_memory> memory(runtime, 0); */
template <class Resource, class OutOfMemory>
class throwing : public detail::resource_names<throwing<Resource, OutOfMemory>> {
public:
    throwing(runtime_view runtime, std::uint32_t device) noexcept
        : throwing::resource_names(runtime, device), resource_(runtime, device) {}

    runtime_view runtime() const noexcept { return resource_.runtime(); }
    std::uint32_t device() const noexcept { return resource_.device(); }

    void *allocate_on(stream_handle stream, std::size_t bytes, std::size_t align = 256) {
        return translate([&] { return resource_.allocate_on(stream, bytes, align); });
    }
    void deallocate_on(stream_handle stream, void *memory, std::size_t bytes = 0) noexcept {
        resource_.deallocate_on(stream, memory, bytes);
    }
    void *allocate_sync(std::size_t bytes, std::size_t align = 256) {
        return translate([&] { return resource_.allocate_sync(bytes, align); });
    }
    void deallocate_sync(void *memory, std::size_t bytes = 0, std::size_t align = 256) noexcept {
        resource_.deallocate_sync(memory, bytes, align);
    }

#if AQUIFER_CUDA_MR
    template <class R = Resource, class Property = cuda::mr::device_accessible,
              class = decltype(get_property(std::declval<const R &>(), Property()))>
    friend constexpr void get_property(const throwing &, cuda::mr::device_accessible) noexcept {}
    template <class R = Resource, class Property = cuda::mr::host_accessible,
              class = decltype(get_property(std::declval<const R &>(), Property()))>
    friend constexpr void get_property(const throwing &, cuda::mr::host_accessible) noexcept {}
#if defined(CCCL_VERSION) && CCCL_VERSION >= 3002000
    using default_queries = typename Resource::default_queries;
#endif
#endif

private:
    template <class Allocate>
    static void *translate(Allocate allocate) {
        try {
            return allocate();
        } catch (const out_of_memory &error) {
            throw OutOfMemory(error.what());
        }
    }

    Resource resource_;
};

}  // namespace AQUIFER_CONFIGURATION

/* A standard allocator of pinned host memory near a device: std::vector<T, pinned_allocator<T>>.
 * Calls aq_pinned_alloc, which blocks while the pool grows, and aq_pinned_free. Throws
 * out_of_memory, call_error and std::bad_array_new_length. Where memory cannot be pinned it is
 * pageable. Copies that still use the memory must have been waited for before the container frees
 * it, or recorded by aq_pinned_record_use. */
template <class T>
class pinned_allocator {
public:
    using value_type = T;
    using propagate_on_container_move_assignment = std::true_type;
    using propagate_on_container_swap = std::true_type;
    using is_always_equal = std::false_type;

    pinned_allocator(runtime_view runtime, std::uint32_t device) noexcept
        : runtime_(runtime), device_(device) {}
    template <class U>
    pinned_allocator(const pinned_allocator<U> &other) noexcept
        : runtime_(other.runtime()), device_(other.device()) {}

    runtime_view runtime() const noexcept { return runtime_; }
    std::uint32_t device() const noexcept { return device_; }

    [[nodiscard]] T *allocate(std::size_t count) {
        return static_cast<T *>(
            detail::allocate_pinned(runtime_, device_, detail::bytes_of<T>(count), alignof(T)));
    }
    void deallocate(T *memory, std::size_t) noexcept { detail::free_pinned(memory); }

    template <class U>
    friend bool operator==(const pinned_allocator &a, const pinned_allocator<U> &b) noexcept {
        return a.runtime() == b.runtime() && a.device() == b.device();
    }
    template <class U>
    friend bool operator!=(const pinned_allocator &a, const pinned_allocator<U> &b) noexcept {
        return !(a == b);
    }

private:
    runtime_view runtime_;
    std::uint32_t device_;
};

#if defined(__cpp_lib_memory_resource) && defined(__cpp_rtti)
/* A std::pmr::memory_resource of pinned host memory near a device, otherwise like
 * pinned_allocator. It must outlive the containers that use it, but need not outlive their runtime
 * to free. It needs run-time type information (not -fno-rtti). */
class pinned_memory_resource final : public std::pmr::memory_resource {
public:
    pinned_memory_resource(runtime_view runtime, std::uint32_t device) noexcept
        : runtime_(runtime), device_(device) {}

private:
    void *do_allocate(std::size_t bytes, std::size_t align) override {
        return detail::allocate_pinned(runtime_, device_, bytes, align);
    }
    void do_deallocate(void *memory, std::size_t, std::size_t) override {
        detail::free_pinned(memory);
    }
    bool do_is_equal(const std::pmr::memory_resource &other) const noexcept override {
        const auto *same = dynamic_cast<const pinned_memory_resource *>(&other);
        return same != nullptr && same->runtime_ == runtime_ && same->device_ == device_;
    }

    runtime_view runtime_;
    std::uint32_t device_;
};
#endif

/* ---- PyTorch -------------------------------------------------------------------------------- */

/* Holds one use of a pool of captured graphs, by the two numbers with which PyTorch names it:
 * aq_torch_pool_retain and aq_torch_pool_release. */
class torch_pool_user {
public:
    torch_pool_user() noexcept = default;
    torch_pool_user(int device, std::uint64_t first, std::uint64_t second) {
        check(aq_torch_pool_retain(device, first, second));
        use_ = owned_use(use_record{true, device, first, second});
    }

    explicit operator bool() const noexcept { return !use_.is_empty(); }
    /* Keeps the use without an owner: end it by aq_torch_pool_release. */
    void release() noexcept { use_.release(); }
    void reset() noexcept { use_.reset(); }

private:
    struct use_record {
        bool is_held;
        int device;
        std::uint64_t first;
        std::uint64_t second;
    };
    struct use_deleter {
        static bool empty(const use_record &value) noexcept { return !value.is_held; }
        static void end(const use_record &value) noexcept {
            detail::check_dropped("aq_torch_pool_release",
                                  aq_torch_pool_release(value.device, value.first, value.second));
        }
    };
    using owned_use = detail::owned<use_record, use_deleter>;
    owned_use use_;
};

/* ---- The simulated device, for tests -------------------------------------------------------- */

/* Owns a stream of a simulated device: aq_sim_stream_create and aq_sim_stream_destroy. */
class sim_stream {
public:
    sim_stream() noexcept = default;
    sim_stream(runtime_view runtime, std::uint32_t device) {
        stream_handle stream = nullptr;
        check(aq_sim_stream_create(runtime.get(), device, &stream));
        stream_ = owned_stream(stream_record{runtime.get(), device, stream});
    }

    stream_handle get() const noexcept { return stream_.value().stream; }
    explicit operator bool() const noexcept { return !stream_.is_empty(); }
    [[nodiscard]] stream_handle release() noexcept { return stream_.release().stream; }
    void reset() noexcept { stream_.reset(); }

    /* Calls aq_sim_stream_wait: later work here waits for what is queued on `other`. */
    void wait(stream_handle other) const {
        check(aq_sim_stream_wait(stream_.value().runtime, stream_.value().device, get(), other));
    }
    /* Calls aq_sim_stream_synchronize. Blocks until the work queued here is complete. */
    void synchronize() const {
        check(aq_sim_stream_synchronize(stream_.value().runtime, stream_.value().device, get()));
    }

private:
    struct stream_record {
        aq_runtime runtime;
        std::uint32_t device;
        stream_handle stream;
    };
    struct stream_deleter {
        static bool empty(const stream_record &value) noexcept { return value.stream == nullptr; }
        static void end(const stream_record &value) noexcept {
            const aq_status status =
                aq_sim_stream_destroy(value.runtime, value.device, value.stream);
            /* The runtime destroyed the stream. */
            if (status != AQ_ERROR_CLOSED) detail::check_dropped("aq_sim_stream_destroy", status);
        }
    };
    using owned_stream = detail::owned<stream_record, stream_deleter>;
    owned_stream stream_;
};

/* Owns a graph of a simulated device, from aq_sim_capture_end: aq_sim_graph_destroy. */
class sim_graph {
public:
    sim_graph() noexcept = default;
    sim_graph(runtime_view runtime, std::uint32_t device, std::uint64_t graph) noexcept
        : graph_(graph_record{runtime.get(), device, graph}) {}

    std::uint64_t get() const noexcept { return graph_.value().graph; }
    explicit operator bool() const noexcept { return !graph_.is_empty(); }
    [[nodiscard]] std::uint64_t release() noexcept { return graph_.release().graph; }
    void reset() noexcept { graph_.reset(); }

    /* Calls aq_sim_graph_launch. */
    void launch(stream_handle stream) const {
        check(aq_sim_graph_launch(graph_.value().runtime, graph_.value().device, get(), stream));
    }

private:
    struct graph_record {
        aq_runtime runtime;
        std::uint32_t device;
        std::uint64_t graph;
    };
    struct graph_deleter {
        static bool empty(const graph_record &value) noexcept { return value.runtime == 0; }
        static void end(const graph_record &value) noexcept {
            const aq_status status = aq_sim_graph_destroy(value.runtime, value.device, value.graph);
            if (status != AQ_ERROR_CLOSED) detail::check_dropped("aq_sim_graph_destroy", status);
        }
    };
    using owned_graph = detail::owned<graph_record, graph_deleter>;
    owned_graph graph_;
};

}  // namespace aquifer

#undef AQUIFER_CONFIGURATION

#endif
