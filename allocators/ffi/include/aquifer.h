/* aquifer for C and C++: device memory cached per stream, pinned host memory, and staging between
 * the two.
 *
 * This file documents the interface. It is C11 and C++17, and includes only <stddef.h> and
 * <stdint.h>. For C++17, aquifer.hpp adds owners, exceptions and allocators.
 *
 *     aq_runtime_options options = {0};          // aq_runtime_options options{} in C++
 *     options.size = sizeof options;
 *     aq_runtime rt;
 *     if (aq_runtime_create(&options, &rt)) fail(aq_last_error());
 *     uint64_t x;
 *     if (aq_alloc(rt, 0, 1 << 20, stream, &x)) fail(aq_last_error());
 *     kernel<<<1, 1, 0, stream>>>((float *)x);
 *     aq_free(rt, 0, x);                         // no wait: later work on the stream may reuse it
 *     aq_runtime_destroy(rt);
 *
 * Units.      Sizes, offsets and limits are in bytes, times in nanoseconds.
 *
 * Errors.     A call returns AQ_OK, which is 0, or a code of `aq_status`. A call that returns an
 *             error has changed nothing, unless its comment says so. Codes keep their numbers.
 *             Later versions add codes: treat an unknown code like AQ_ERROR_OTHER.
 *             aq_last_error() returns the text. No exception or panic leaves the library: it
 *             becomes AQ_ERROR_PANIC, a bug, after which the library still works.
 *
 * Blocking.   A function blocks only if its comment says so.
 *
 * Threads.    Every function may be called by any number of threads at the same time. Threads need
 *             no registration. Do not call from a signal handler. In a child of fork(), call exec
 *             only.
 *
 * Ownership.  Runtimes and tickets are numbers, not pointers, and no number is reused. A number
 *             that is no longer valid gives AQ_ERROR_CLOSED or AQ_ERROR_UNKNOWN_TICKET. Device
 *             blocks are addresses. Objects may be destroyed in any order: a block that is live
 *             when its runtime is destroyed stays valid and can be freed. Its memory is released
 *             to the driver with the last such block.
 *
 * Streams.    A `void *stream` is the driver's handle: `CUstream` or `cudaStream_t`. NULL and 1
 *             are the device's legacy default stream. 2 is the default stream of the calling
 *             thread, a different one for each thread. It must be a stream of the device in the
 *             same call, in its primary context, and alive during the call. (The simulated driver
 *             rejects an invalid handle; CUDA may crash.)
 *             The lifetime of a stream matters, because memory that was freed on it is ordered
 *             with it later:
 *               - For an unregistered stream (AQ_STREAMS_UNTOLD) an event is recorded at each free
 *                 and at each recorded use, while the stream is known to exist. Each call asks the
 *                 driver whether the handle is still the same stream. Blocks that were allocated
 *                 for it must be freed before it is destroyed.
 *               - For a registered stream (aq_stream_register), or with AQ_STREAMS_RETIRED, the
 *                 caller guarantees to call aq_stream_retire before it is destroyed. No events are
 *                 recorded and no queries are made.
 *             Blocks of a per-thread default stream should be freed by its own thread. If another
 *             thread frees them, they are held back until the stream's thread calls the library.
 *
 * Devices.    A `uint32_t device` is the index of a device of the runtime, from 0, in the driver's
 *             order.
 *
 * Structs     begin with `size`, which the caller sets to sizeof, so that they can grow. A library
 *             that knows more fields than its caller takes the rest as zero and fills only what is
 *             there. A library that knows fewer rejects nonzero unknown fields with
 *             AQ_ERROR_VERSION, and returns in `size` how much it has filled.
 *
 * Linking.    cc program.c -laquifer_ffi, or statically libaquifer_ffi.a -lpthread -ldl -lm. CUDA
 *             is opened at run time: neither the program nor the library links to it. All exported
 *             names begin with aq_. For two versions in one process: dlopen each with RTLD_LOCAL,
 *             which separates their names and their runtimes. Do not link both, and do not free
 *             with one what the other allocated. dlclose does not unload the library, since
 *             threads may be executing in it.
 *
 * Environment. The variables of the library's documentation apply: AQUIFER_TRACE, AQUIFER_BYPASS,
 *             AQUIFER_DEBUG, AQUIFER_LEDGER. For an invalid value aq_runtime_create returns
 *             AQ_ERROR_BAD_SETTING.
 */
#ifndef AQUIFER_H
#define AQUIFER_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The version of this header. Within a major version nothing declared here changes or is removed.
 * While the major version is 0, this holds within a minor version. */
#define AQ_VERSION_MAJOR 0
#define AQ_VERSION_MINOR 4

/* Returns the version of the loaded library: major << 16 | minor. */
uint32_t aq_version(void);

/* ---- Errors --------------------------------------------------------------------------------- */

typedef int32_t aq_status;
enum {
    AQ_OK = 0,
    AQ_NOT_READY = 1,              /* not complete yet; no error, and no text */
    AQ_ERROR_NULL = 2,             /* a required pointer is null */
    AQ_ERROR_BAD_ARGUMENT = 3,     /* an invalid argument */
    AQ_ERROR_VERSION = 4,          /* a struct with a size or fields that this version does not
                                      know */
    AQ_ERROR_BAD_RUNTIME = 5,      /* not a runtime */
    AQ_ERROR_CLOSED = 6,           /* a runtime that was destroyed */
    AQ_ERROR_ZERO_SIZE = 7,        /* zero bytes of pinned memory */
    AQ_ERROR_TOO_LARGE = 8,        /* more than INT64_MAX bytes; less is AQ_ERROR_OUT_OF_MEMORY */
    AQ_ERROR_BAD_ALIGNMENT = 9,    /* not a power of two, or larger than supported */
    AQ_ERROR_OUT_OF_MEMORY = 10,   /* out of memory after all attempts to reclaim; the text
                                      reports usage, owners and remedies */
    AQ_ERROR_OUT_OF_BUDGET = 11,   /* a limit refused the bytes; no memory was reclaimed */
    AQ_ERROR_DRIVER = 12,          /* a driver error; the text has its call and code */
    AQ_ERROR_SYSTEM = 13,          /* an error of the operating system */
    AQ_ERROR_DEVICE_LOST = 14,     /* a sticky error; only the application may reset the device */
    AQ_ERROR_NO_DEVICE = 15,       /* no device with this index */
    AQ_ERROR_WRONG_DEVICE = 16,    /* a block of another device */
    AQ_ERROR_FOREIGN_BLOCK = 17,   /* not a live block */
    AQ_ERROR_DOUBLE_FREE = 18,     /* a block that was already freed */
    AQ_ERROR_OUT_OF_BOUNDS = 19,   /* bytes beyond the end of a block */
    AQ_ERROR_BUSY = 20,            /* a pending use that excludes this one */
    AQ_ERROR_CAPACITY = 21,        /* the maximum number of the library's own streams is in use */
    AQ_ERROR_CAPTURING = 22,       /* the stream is capturing a graph, so it cannot be waited for */
    AQ_ERROR_UNKNOWN_STREAM = 23,  /* not a stream, or one that was never used here */
    AQ_ERROR_OTHER_THREAD = 24,    /* the default stream of another thread */
    AQ_ERROR_UNSUPPORTED = 25,     /* not supported by the driver or the device */
    AQ_ERROR_TIMED_OUT = 26,       /* a deadline passed */
    AQ_ERROR_BAD_SETTING = 27,     /* an invalid option or environment variable */
    AQ_ERROR_STAGING = 28,         /* a transfer failed */
    AQ_ERROR_CANCELLED = 29,       /* a transfer was cancelled */
    AQ_ERROR_UNKNOWN_TICKET = 30,  /* not a ticket, or one that was freed */
    AQ_ERROR_PANIC = 31,           /* a bug in the library, which still works */
    AQ_ERROR_OTHER = 32,           /* any other error */
    AQ_ERROR_PARKED = 33,          /* memory that is parked: resume it first */
    AQ_ERROR_UNCOMMITTED = 34      /* a page without memory: commit it first */
};

/* Returns the name of a status, such as "AQ_ERROR_NULL". Never null. The text is static. */
const char *aq_status_name(aq_status status);

/* Returns the text of the calling thread's last error, which may have several lines. For
 * AQ_ERROR_OUT_OF_MEMORY it is the full report. "" if no call has failed. Never null. Valid until
 * the thread's next failing call, or its end. */
const char *aq_last_error(void);

/* Frees a text that a function of this library returned. Null is ignored. */
void aq_text_free(char *text);

/* ---- Runtimes ------------------------------------------------------------------------------- */

typedef uint64_t aq_runtime; /* never 0 */

enum {
    AQ_DRIVER_MACHINE = 0,       /* the machine's CUDA driver; without one there are no devices,
                                    but host memory works */
    AQ_DRIVER_SIM = 1,           /* a simulated device that checks every access, for tests */
    AQ_DRIVER_MACHINE_OR_SIM = 2 /* the first, or the second if there is no driver */
};
enum {
    AQ_STREAMS_UNTOLD = 0, /* streams may be destroyed without notice */
    AQ_STREAMS_RETIRED = 1 /* aq_stream_retire is called before any stream is destroyed */
};
enum {
    AQ_SIM_PLAIN = 1,    /* simulated devices without virtual memory management */
    AQ_SIM_UNCHECKED = 2 /* simulated devices without checks, for measurements */
};
enum {
    AQ_SHARED_DEVICES = 1, /* the memory of each device is shared with other processes */
    AQ_SHARED_PINNED = 2,  /* so is pinned memory */
    AQ_SHARED_RESERVED = 4 /* guarantees are kept free while they are not used, and not lent */
};

/* Zero selects the default of each field. */
typedef struct aq_runtime_options {
    size_t size;                /* sizeof(aq_runtime_options) */
    uint32_t driver;            /* AQ_DRIVER_... */
    uint32_t streams;           /* AQ_STREAMS_..., for streams that are not registered */
    uint32_t sim_devices;       /* number of simulated devices; 0: one */
    uint32_t sim_flags;         /* AQ_SIM_..., combined by | */
    uint64_t sim_memory;        /* bytes per simulated device; 0: 16 GiB; the host backs only
                                   what is written */
    uint64_t sim_seed;          /* nonzero: queued work runs late, in an order derived from the
                                   seed; 0: at once */
    uint64_t device_limit;      /* limit of bytes per device; 0: four fifths of what is free now */
    uint64_t pinned_limit;      /* limit of pinned bytes; 0: half of the memory of the host or
                                   its control group */
    uint64_t wait_ns;           /* how long an allocation waits for memory that is still in use;
                                   0: 10 s */
    uint64_t release_threshold; /* idle bytes per device above which memory is released to the
                                   driver; 0: unlimited */
    uint64_t history;           /* number of recent events kept for aq_memory_snapshot, 64 bytes
                                   each, at most 2^24; 0: none. Adds up to 0.5 us to an
                                   allocation and its free. With AQUIFER_TRACE, the trace gets
                                   the same events */
    uint32_t shared;            /* AQ_SHARED_..., combined by |: bytes are claimed from ledgers
                                   before they are taken, and given back on others' need */
    int32_t shared_priority;    /* the order among processes that wait for shared memory */
    uint64_t shared_guarantee;  /* bytes of each device that are guaranteed to this process.
                                   With AQ_SHARED_DEVICES, device_limit 0 is the capacity */
    uint64_t pinned_guarantee;  /* bytes of pinned memory that are guaranteed to this process */
    const char *ledger_folder;  /* the folder of the ledgers; null: that of AQUIFER_LEDGER */
    const char *plan;           /* a file of `aquifer plan`, which every device's pool maps when it
                                   is opened; null: that of AQUIFER_PLAN, if it is set */
    uint64_t slack;             /* per cent of the peak of its live bytes that the pool of each
                                   device may hold beyond it, at most 10000; 0: 17, or 64 MiB if
                                   that is more. 6 packs tightly, against a slower first use and
                                   moves of free memory */
} aq_runtime_options;

/* Creates a runtime: opens the driver, creates a context on each device (which takes the driver's
 * time for that), reads the machine's topology. Allocates no memory. Starts no thread, except one
 * for each shared memory, which answers other processes. `options` may be null.
 * AQ_ERROR_NULL, _BAD_ARGUMENT, _VERSION, _BAD_SETTING, _DRIVER. A machine without a GPU is not an
 * error. */
aq_status aq_runtime_create(const aq_runtime_options *options, aq_runtime *runtime);

/* Destroys a runtime. Free memory is released to the driver at once, as far as this needs no wait
 * for the device. Live blocks stay valid until they are freed, and so do tickets. All other calls
 * for this runtime return AQ_ERROR_CLOSED from now on. A thread that has used the runtime keeps
 * its bookkeeping, but no memory of the pools, until it uses another runtime or ends. May block,
 * for as long as the driver takes. */
aq_status aq_runtime_destroy(aq_runtime runtime);

/* ---- Devices -------------------------------------------------------------------------------- */

typedef struct aq_device_facts {
    size_t size;             /* sizeof(aq_device_facts), set by the caller */
    uint64_t memory;         /* bytes of memory */
    uint64_t free_memory;    /* bytes that are free now according to the driver: a hint */
    uint64_t granularity;    /* bytes per physical handle; 0 without virtual memory management */
    uint32_t ordinal;        /* the driver's ordinal */
    uint32_t major;          /* compute capability: 9 of 9.0 */
    uint32_t minor;          /* compute capability: 0 of 9.0 */
    int32_t node;            /* the nearest NUMA node; -1 if unknown */
    uint32_t simulated;      /* nonzero: simulated */
    uint32_t virtual_memory; /* nonzero: has virtual memory management */
    char name[128];          /* truncated to fit, terminated by a zero */
    char pci_address[32];    /* likewise; "" if unknown */
} aq_device_facts;

/* Stores the number of devices of the runtime in `*count`. */
aq_status aq_device_count(aq_runtime runtime, uint32_t *count);

/* Stores the properties of a device in `*facts`. Makes one driver call (cuMemGetInfo, 4 us). */
aq_status aq_device(aq_runtime runtime, uint32_t device, aq_device_facts *facts);

/* ---- Device memory -------------------------------------------------------------------------- */

/* Allocates a block of `bytes`, aligned to 512, for work queued on `stream` from now on. In most
 * cases there is no driver call and no wait. If the stream's cache has no room, memory is searched
 * in several steps: ranges freed by other streams, new memory, other pools. The last step blocks
 * until memory in use becomes free, for at most `wait_ns`. The address is stored in `*address`,
 * which is unchanged after an error. For 0 bytes it is 0: an empty block, which takes no memory and
 * which every call for blocks accepts.
 * AQ_ERROR_NULL, _TOO_LARGE, _OUT_OF_MEMORY, _NO_DEVICE, _UNKNOWN_STREAM,
 * _DEVICE_LOST, _DRIVER. */
aq_status aq_alloc(aq_runtime runtime, uint32_t device, uint64_t bytes, void *stream,
                   uint64_t *address);

/* As aq_alloc, aligned to `align`, a power of two up to 2 MiB. Also AQ_ERROR_BAD_ALIGNMENT. */
aq_status aq_alloc_aligned(aq_runtime runtime, uint32_t device, uint64_t bytes, uint64_t align,
                           void *stream, uint64_t *address);

/* Frees a block in the order of the stream that it was allocated for: work queued there earlier
 * may still use it, and work queued there later may get its memory. Uses by other streams must
 * have been recorded (aq_record_use). Any thread may free it. Never waits, and makes no driver
 * call unless the stream is unregistered. 0 is ignored.
 * AQ_ERROR_FOREIGN_BLOCK, _DOUBLE_FREE, _WRONG_DEVICE: nothing was freed, and no memory is lost. A
 * second free of a block whose memory has moved on may be reported as _FOREIGN_BLOCK. Also frees
 * blocks of a destroyed runtime. */
aq_status aq_free(aq_runtime runtime, uint32_t device, uint64_t address);

/* The kind of an access. AQ_READ | AQ_WRITE is both. */
enum { AQ_READ = 1, AQ_WRITE = 2 };

/* Records that work queued on `stream` so far uses the block: its memory is not reused before
 * that work is complete. Call it after the launch. The caller must have made `stream` wait for
 * the block's own stream before (cudaStreamWaitEvent). For the block's own stream it does
 * nothing. Never waits.
 * AQ_ERROR_FOREIGN_BLOCK, _DOUBLE_FREE, _WRONG_DEVICE, _BAD_ARGUMENT, _UNKNOWN_STREAM,
 * _CAPTURING. */
aq_status aq_record_use(aq_runtime runtime, uint32_t device, uint64_t address, void *stream,
                        uint32_t access);

/* Records that `stream` has read and written the block, and frees the block. The runtime must be
 * open. */
aq_status aq_free_on(aq_runtime runtime, uint32_t device, uint64_t address, void *stream);

/* Stores the requested size of a block and its capacity. Either pointer may be null. */
aq_status aq_block_size(aq_runtime runtime, uint32_t device, uint64_t address, uint64_t *asked,
                        uint64_t *capacity);

/* Releases free memory to the driver until the device's pool holds at most `keep` bytes, as far as
 * this needs no wait. The number of released bytes is stored in `*given`, which may be null. May
 * take the driver milliseconds. */
aq_status aq_trim(aq_runtime runtime, uint32_t device, uint64_t keep, uint64_t *given);

/* ---- Streams -------------------------------------------------------------------------------- */

/* Registers a stream: the caller guarantees to call aq_stream_retire before the stream is
 * destroyed, which makes frees on it cheap. Default streams need no registration. For a stream
 * that was used before, it blocks until the work queued there is complete. */
aq_status aq_stream_register(aq_runtime runtime, uint32_t device, void *stream);

/* Announces that the stream is about to be destroyed by its owner. Blocks until the work queued
 * there is complete. Its blocks stay valid, and its free memory serves other streams. Free its
 * blocks before: a later free is ordered only after the work that is complete now.
 * AQ_ERROR_UNKNOWN_STREAM if the runtime has not used the stream. It may then be destroyed. */
aq_status aq_stream_retire(aq_runtime runtime, uint32_t device, void *stream);

/* ---- Limits and statistics ------------------------------------------------------------------ */

/* Stores the device's limit and its held bytes. Either pointer may be null. */
aq_status aq_limit(aq_runtime runtime, uint32_t device, uint64_t *limit, uint64_t *used);

/* Sets the limit. A limit below the held bytes releases nothing: allocations that need more memory
 * fail until enough is released, by frees and aq_trim. The held bytes above the limit are stored
 * in `*excess`, which may be null. */
aq_status aq_set_limit(aq_runtime runtime, uint32_t device, uint64_t limit, uint64_t *excess);

/* Charges memory that the caller is about to allocate itself (by cudaMalloc, by another library) to
 * the limit, and to the ledger of a runtime that shares its devices. If it does not fit, the pool's
 * free memory is released first, which blocks as an allocation does.
 * AQ_ERROR_OUT_OF_BUDGET if it does not fit then; nothing is charged. */
aq_status aq_charge(aq_runtime runtime, uint32_t device, uint64_t bytes);

/* Releases bytes that were charged, all or a part, after the caller has freed them. Never blocks.
 * AQ_ERROR_BAD_ARGUMENT if fewer are charged. */
aq_status aq_uncharge(aq_runtime runtime, uint32_t device, uint64_t bytes);

/* The limit of all pinned memory of the runtime. */
aq_status aq_pinned_limit(aq_runtime runtime, uint64_t *limit, uint64_t *used);
aq_status aq_set_pinned_limit(aq_runtime runtime, uint64_t limit, uint64_t *excess);

/* Fields are in bytes unless marked as a count. live + cached + pending is the total of blocks and
 * caches. */
typedef struct aq_stats {
    size_t size;             /* sizeof(aq_stats), set by the caller */
    uint64_t live;           /* in live blocks, rounded sizes */
    uint64_t requested;      /* in live blocks, requested sizes */
    uint64_t cached;         /* free for reuse */
    uint64_t pending;        /* freed, but held back until a use on another stream is complete */
    uint64_t physical;       /* held from the driver or the kernel; this is what the limit bounds */
    uint64_t peak_live;      /* the maximum of `live` of all streams together, and up to 1 MiB more
                                for each of several streams */
    uint64_t peak_requested; /* likewise */
    uint64_t peak_physical;  /* the maximum of `physical` */
    uint64_t blocks;         /* count: live blocks */
    uint64_t allocations;    /* count: successful allocations */
    uint64_t frees;          /* count: frees */
    uint64_t failures;       /* count: failed allocations */
    uint64_t growths;        /* count: allocations from the driver or the kernel */
    uint64_t reaped;         /* total bytes released to the driver or the kernel */
    uint64_t moves;          /* count: physical handles moved */
    uint64_t adoptions;      /* count: ranges that one stream took over from another */
    uint64_t fences;         /* count: events recorded */
    uint64_t stream_waits;   /* count: waits of one stream for another */
    uint64_t host_waits;     /* count: waits of the host */
    uint64_t plan_hits;      /* count: allocations that the plan has served */
    uint64_t plan_strays;    /* count: those that it has not, while it was in use */
    uint64_t plan_overlaps;  /* count: those of plan_strays whose place was still held, or
                                not ordered */
    uint64_t plan_resynchronisations; /* count: how often the position in the plan was lost and
                                         found again */
} aq_stats;

/* Stores the statistics of a device's pool. Makes no driver call. Each field is correct, but the
 * fields may be from different times. */
aq_status aq_device_stats(aq_runtime runtime, uint32_t device, aq_stats *stats);

/* Resets the three peaks to the current values. */
aq_status aq_reset_peaks(aq_runtime runtime, uint32_t device);

/* Stores the statistics of the pool of pinned memory near a device. */
aq_status aq_pinned_stats(aq_runtime runtime, uint32_t device, aq_stats *stats);

/* Returns the state of the runtime as one JSON object: {"format": "aquifer-snapshot", "version":
 * 1, "driver", "devices": [{"ordinal", "name", "memory", "budget", "stats", "findings", ...}],
 * "pinned_budget", "pinned": [{"node", "stats", "regions"}]}. Later versions add fields. Free the
 * text with aq_text_free. */
aq_status aq_snapshot(aq_runtime runtime, char **json);

/* Writes the recent events and all live blocks of a device's pool to the file at `path`, which is
 * created or overwritten. Live blocks of graphs are included only if they are among the events.
 * The format is the pickle of torch.cuda.memory._dump_snapshot(), for
 * https://pytorch.org/memory_viz, `python -m torch.cuda._memory_viz` and `aquifer replay`. The
 * events are kept, so the next snapshot contains them again. Blocks while it writes the file.
 * AQ_ERROR_NULL, _NO_DEVICE; _UNSUPPORTED for a runtime created without `history`; _SYSTEM, after
 * which the file may be incomplete. */
aq_status aq_memory_snapshot(aq_runtime runtime, uint32_t device, const char *path);

/* ---- Pinned host memory --------------------------------------------------------------------- */

/* Allocates a block of pinned host memory on the NUMA node next to the device, or on any node if
 * there is no such device. `align` is a power of two, or 0 for 64. Not zeroed. If the memory
 * cannot be pinned it is pageable: see aq_pinned_is_pinned. Blocks while the pool grows (from 10
 * ms per GiB), which also delays kernel launches. A child of fork() has the same pages and may read
 * them.
 * AQ_ERROR_NULL, _ZERO_SIZE, _TOO_LARGE, _BAD_ALIGNMENT, _OUT_OF_MEMORY. */
aq_status aq_pinned_alloc(aq_runtime runtime, uint32_t device, uint64_t bytes, uint64_t align,
                          void **memory);

/* Frees the block, from any thread, also after its runtime was destroyed. Queued copies that still
 * use it must have been recorded (aq_pinned_record_use) or waited for. Null is ignored.
 * AQ_ERROR_FOREIGN_BLOCK if it is not a live block. */
aq_status aq_pinned_free(void *memory);

/* Stores 1 if devices can access the block without staging, or else 0. */
aq_status aq_pinned_is_pinned(void *memory, int *pinned);

/* Records that work queued on `stream` so far uses the block: after its free, the memory is not
 * reused before that work is complete. Never waits. */
aq_status aq_pinned_record_use(void *memory, aq_runtime runtime, uint32_t device, void *stream);

/* Releases free pinned memory to the kernel, but keeps `keep` free bytes. For idle times: blocks
 * until the devices are idle. The number of released bytes is stored in `*given`, which may be
 * null. */
aq_status aq_pinned_trim(aq_runtime runtime, uint32_t device, uint64_t keep, uint64_t *given);

/* ---- Staging -------------------------------------------------------------------------------- */

/* Copies `bytes` of pageable (or any) host memory to a device block, from `offset` on, through
 * pinned slots and at the speed of the link. The copy is ordered after all work queued on `stream`
 * so far, and after recorded uses of the block. Blocks until it is complete, so all work queued
 * later, on any stream, is ordered after it. The first transfer of a device allocates some MiB of
 * pinned memory, and large ones start threads. 0 bytes do nothing.
 * If transfers that are pending at the same time name the same part of a block, or overlapping
 * parts, and at least one of them writes the block, the bytes in the overlap are undefined.
 * AQ_ERROR_NULL, _FOREIGN_BLOCK, _DOUBLE_FREE, _WRONG_DEVICE, _OUT_OF_BOUNDS, _BUSY,
 * _UNKNOWN_STREAM, _CAPTURING, _STAGING, and driver errors. After an error some of the bytes may
 * have been copied. */
aq_status aq_upload(aq_runtime runtime, uint32_t device, uint64_t block, uint64_t offset,
                    const void *host, uint64_t bytes, void *stream);

/* The same in the other direction, from the block to host memory. */
aq_status aq_download(aq_runtime runtime, uint32_t device, uint64_t block, uint64_t offset,
                      void *host, uint64_t bytes, void *stream);

typedef uint64_t aq_ticket; /* never 0 */

/* Begin the same transfers without waiting for them. `*ticket` identifies the transfer. The host
 * memory must stay allocated and must not be used until the ticket was waited for or freed. Work
 * queued after aq_ticket_wait, or after aq_ticket_poll returned AQ_OK, is ordered after the copy.
 * Work queued earlier may not be, not even on `stream`. The block may be freed meanwhile: its
 * memory is returned when the copy is complete. Blocks while the maximum number of transfers (16)
 * is pending.
 * The bytes of parts that are named twice or that overlap are undefined, as for aq_upload. */
aq_status aq_upload_begin(aq_runtime runtime, uint32_t device, uint64_t block, uint64_t offset,
                          const void *host, uint64_t bytes, void *stream, aq_ticket *ticket);
aq_status aq_download_begin(aq_runtime runtime, uint32_t device, uint64_t block, uint64_t offset,
                            void *host, uint64_t bytes, void *stream, aq_ticket *ticket);

/* Returns whether the copy is complete: AQ_OK, AQ_NOT_READY, or the error that ended it. Never
 * blocks. */
aq_status aq_ticket_poll(aq_ticket ticket);

/* Blocks until the copy has ended, and helps with it. Returns AQ_OK, or the error that ended it.
 * May be called again. */
aq_status aq_ticket_wait(aq_ticket ticket);

/* Frees a ticket. A pending copy is cancelled and waited for, which blocks for about one chunk of
 * it. Every ticket must be freed once. 0 is ignored. */
aq_status aq_ticket_free(aq_ticket ticket);

/* ---- PyTorch -------------------------------------------------------------------------------- */

/* The functions for torch.cuda.memory.CUDAPluggableAllocator and its hooks, over one runtime of
 * the process. The runtime is created at the first of these calls, on the machine's driver with
 * AQ_STREAMS_RETIRED, since PyTorch never destroys its streams. A stream that PyTorch does not own
 * (ExternalStream) must be retired before it is destroyed. aq_torch_runtime returns the runtime,
 * for limits, statistics and snapshots. `python/aquifer_torch` sets all of this up.
 * PyTorch's own class ignores the codes of its hooks. A failed aq_torch_alloc returns null, and
 * aq_last_error() returns the text. Set the record_stream hook: without it, PyTorch's
 * record_stream has no effect. */

/* Creates it with other options, before PyTorch's first allocation.
 * AQ_ERROR_BUSY if it is already open. */
aq_status aq_torch_setup(const aq_runtime_options *options);
aq_status aq_torch_runtime(aq_runtime *runtime);

/* `init`: creates the runtime. */
aq_status aq_torch_init(int device_count);

/* `alloc` (alloc_fn_name): returns null for 0 bytes, and if there is no memory. */
void *aq_torch_alloc(ptrdiff_t size, int device, void *stream);

/* The same with a code, for callers that raise errors. `*memory` is null for 0 bytes. As
 * aq_alloc. */
aq_status aq_torch_malloc(ptrdiff_t size, int device, void *stream, void **memory);

/* `free` (free_fn_name): frees in the order of the stream that the block was allocated for, and
 * after all work queued so far on the streams that it was recorded on. A device of -1 stands for
 * the block's device. */
aq_status aq_torch_free(void *memory, ptrdiff_t size, int device, void *stream);

/* `record_stream`: unlike aq_record_use it covers all work queued on `stream` until the block is
 * freed, as in PyTorch. */
aq_status aq_torch_record_stream(void *memory, void *stream);

/* `base_alloc`: returns the block that begins at `memory`, and stores its size in `*size`. Returns
 * null for any other address. */
void *aq_torch_base_alloc(void *memory, size_t *size);

/* `memory_fraction`: limits a device to this fraction of its memory, 0 to 1. */
aq_status aq_torch_memory_fraction(double fraction, int device);

/* `reset`, called by torch.cuda.empty_cache(): releases free memory of all devices to the
 * driver. */
aq_status aq_torch_reset(void);

/* Memory of captured graphs, identified by the two numbers with which PyTorch names a pool.
 * Allocations between `begin` and `end` for a stream that the filter accepts come from the pool,
 * captured or not. Their memory is not used for anything else while the pool has users or blocks.
 * Each `begin` and each `retain` adds a user, and each `release` removes one. Until the last one is
 * removed, a graph may be replayed any number of times, on any streams. Afterwards the memory is
 * released at the next aq_torch_reset, aq_trim or shortage of memory. Since graph launches are not
 * reported, this waits for the device. */

/* Returns nonzero if work on `stream` belongs to the pool. Called by any thread that allocates, for
 * its stream. It must not allocate, and no exception may leave it. */
typedef int (*aq_torch_filter)(void *data, void *stream);
typedef void (*aq_torch_drop)(void *data);

/* `begin`, directly before the capture begins. Also creates the pool, whose memory is allocated as
 * needed. The library owns `data` from now on: `drop(data)` is called once, after the last call of
 * the filter, or at once if this function fails.
 * AQ_ERROR_BUSY if the pool has already begun. */
aq_status aq_torch_pool_begin(int device, uint64_t first, uint64_t second, aq_torch_filter filter,
                              void *data, aq_torch_drop drop);

/* `end`, after the capture has ended.
 * AQ_ERROR_BAD_ARGUMENT without a matching begin. */
aq_status aq_torch_pool_end(int device, uint64_t first, uint64_t second);

/* Adds a user without beginning a capture. Also creates the pool. The pool keeps its free memory
 * from now on. Without this, free memory that no captured work has used is given back to the
 * driver when memory is short. */
aq_status aq_torch_pool_retain(int device, uint64_t first, uint64_t second);

/* `release`: removes a user. Never blocks.
 * AQ_ERROR_BAD_ARGUMENT if there is no such pool. */
aq_status aq_torch_pool_release(int device, uint64_t first, uint64_t second);

/* Stores the number of users of a pool, or 0 if it does not exist. */
aq_status aq_torch_pool_uses(int device, uint64_t first, uint64_t second, int *uses);

/* Makes the free memory of a pool serve requests of threads that no pool serves, when there is no
 * other memory (`serves` is not 0), or ends that. A block that was served so is the pool's again
 * when it is freed. Not from pools with a captured graph, whose replays write free memory too.
 * AQ_ERROR_BAD_ARGUMENT if there is no such pool. */
aq_status aq_torch_pool_use_on_oom(int device, uint64_t first, uint64_t second, int serves);

/* A live block: its address, the bytes that were requested, the stream that it was allocated for,
 * and the two numbers of its pool, which are 0 for blocks of no pool. */
typedef struct aq_torch_block {
    uint64_t address;
    uint64_t bytes;
    void *stream;
    uint64_t first;
    uint64_t second;
} aq_torch_block;

/* Stores the live blocks of a device, at most `room` of them, and the number of all in `*count`. In
 * bypass mode only blocks of pools are listed. */
aq_status aq_torch_blocks(int device, aq_torch_block *blocks, size_t room, size_t *count);

/* The same for one pool. A pool that does not exist has none. */
aq_status aq_torch_pool_blocks(int device, uint64_t first, uint64_t second, aq_torch_block *blocks,
                               size_t room, size_t *count);

/* Allocates a block of a pool at the address where it was, after it has been freed: for graphs that
 * are captured behind launches of others, whose results lie there. The contents stay, and the
 * stream waits on the device for the work that used the memory last.
 * AQ_ERROR_BUSY if a part of it is in use; AQ_ERROR_FOREIGN_BLOCK if it is not of this pool. */
aq_status aq_torch_pool_place(int device, const aq_torch_block *block);

/* Memory between processes of one user on one machine.
 * A handle names the process and the block. It is passed on as bytes, any number of times, and is
 * the same for all shares of one block. The receiver asks the process for the block's physical
 * memory over a Unix socket in the abstract namespace, which exists from the first share on, and is
 * answered by one thread. The device must support virtual memory management. */
#define AQ_TORCH_SHARE_BYTES 32

/* Shares the block around `memory` until aq_torch_free frees it: stores the block's handle in the
 * AQ_TORCH_SHARE_BYTES bytes at `handle`, and the distance of `memory` from its first byte in
 * `*offset`. The block stays in place. Receivers can also access what lies in the same physical
 * handles, of 2 MiB or more.
 * AQ_ERROR_FOREIGN_BLOCK outside of any block; AQ_ERROR_UNSUPPORTED. */
aq_status aq_torch_share(void *memory, void *handle, size_t *offset);

/* Maps a shared block, readable and writable, and stores where it begins. The caller orders its
 * work with that of the process that has shared it, and closes the mapping before that process
 * frees the block. Waits for that process for up to 30 s.
 * AQ_ERROR_CLOSED if that process has ended; AQ_ERROR_FOREIGN_BLOCK if the block has been freed;
 * AQ_ERROR_BAD_ARGUMENT for any other bytes, or a process of another user. */
aq_status aq_torch_receive(int device, const void *handle, size_t bytes, void **memory);

/* Waits for the device and unmaps a block that aq_torch_receive has mapped. During a capture it is
 * unmapped later.
 * AQ_ERROR_FOREIGN_BLOCK for any other address. */
aq_status aq_torch_close(void *memory);

/* ---- Elastic memory ------------------------------------------------------------------------- */

/* Device addresses whose pages get memory, and lose it again, such as those of a KV cache. The
 * addresses never change. Offsets and sizes are in bytes. Calls for one reservation wait for a
 * commit of another thread.
 *
 * A kernel that accesses a page without memory ends the context: CUDA reports an illegal address
 * (700), so does each later call, and the process has to end. Nothing finds a stale pointer before.
 * aq_elastic_check tells what a launch may use. */

typedef uint64_t aq_elastic; /* never 0, and never reused */

/* Reserves addresses for `bytes`, for work on `stream` (cuMemAddressReserve). Takes no memory.
 * `*page` is the size of a page, or 0 for that of the pool's handles; it is rounded up to the
 * device's granularity, usually 2 MiB.
 * AQ_ERROR_NULL, _ZERO_SIZE, _TOO_LARGE; _UNSUPPORTED on devices without virtual memory; driver
 * errors. */
aq_status aq_elastic_reserve(aq_runtime runtime, uint32_t device, uint64_t bytes, uint64_t *page,
                             void *stream, aq_elastic *elastic, uint64_t *address);

/* Gives all pages that touch the range memory, or none. A page that is idle, or whose release is
 * pending, gets its own again: at no driver call, if only the reservation's stream has used it.
 * Others get new memory (cuMemCreate, cuMemMap, cuMemSetAccess). The contents are unspecified. For
 * work on the reservation's stream, and on others that is ordered behind it. Blocks as an
 * allocation does.
 * AQ_ERROR_OUT_OF_BOUNDS, _OUT_OF_MEMORY, _BAD_ARGUMENT, _CLOSED; driver errors. */
aq_status aq_elastic_commit(aq_elastic elastic, uint64_t offset, uint64_t bytes);

/* Takes the pages that lie wholly in the range out of use, after the work queued so far on
 * `stream`, on the reservation's own, and on those of earlier calls. The last page lies in it if
 * the range ends where the reservation does. If `idle` is 0, their memory is given back: now if
 * that work is done, else by later calls that need memory, or by aq_trim. Otherwise the pages are
 * idle: they keep their memory until it is needed by this process or by another that shares the
 * device (AQ_SHARED_DEVICES), or aq_trim is called. Pages that are not committed stay as they are.
 * AQ_ERROR_OUT_OF_BOUNDS, _BAD_ARGUMENT, _CLOSED, _UNKNOWN_STREAM; driver errors. */
aq_status aq_elastic_release(aq_elastic elastic, uint64_t offset, uint64_t bytes, void *stream,
                             uint32_t idle);

/* AQ_OK if all pages of the range are committed, else AQ_ERROR_UNCOMMITTED, whose text names the
 * first bytes that are not.
 * AQ_ERROR_OUT_OF_BOUNDS, _BAD_ARGUMENT, _CLOSED. */
aq_status aq_elastic_check(aq_elastic elastic, uint64_t offset, uint64_t bytes);

/* Stores the number of committed ranges, up to `capacity` of them in ascending order, each as the
 * offsets of its first byte and of its end, and the bytes of idle pages. `idle` may be null, and
 * `ranges` if `capacity` is 0.
 * AQ_ERROR_NULL, _BAD_ARGUMENT, _CLOSED. */
aq_status aq_elastic_committed(aq_elastic elastic, uint64_t *ranges, size_t capacity,
                               size_t *count, uint64_t *idle);

/* Stores a DLManagedTensor of DLPack over all addresses, of unsigned bytes and one dimension. It
 * keeps the reservation until its deleter is called.
 * AQ_ERROR_NULL, _BAD_ARGUMENT, _CLOSED. */
aq_status aq_elastic_dlpack(aq_elastic elastic, void **tensor);

/* Destroys a reservation. Never blocks. Once its tensors are gone too, its memory is given back
 * after all work of the device, by aq_trim or when memory is needed.
 * AQ_ERROR_BAD_ARGUMENT, _CLOSED. */
aq_status aq_elastic_destroy(aq_elastic elastic);

/* ---- Registered memory ---------------------------------------------------------------------- */

/* Pools for torch.cuda.MemPool whose memory a transport registers, on a device of PyTorch's
 * runtime: at most 16 at a time. A pool grows by chunks of `chunk_bytes`, rounded up to 2 MiB, or
 * by a larger request. A chunk does not move, is registered before its first part is given out, and
 * is unregistered and released when its last part was freed. It is one allocation of the driver
 * (cuMemAlloc), as UCX and legacy IPC need; or, if `exported` is not 0, one physical handle that a
 * transport exports itself, as NCCL does, by a file descriptor and to network cards. */

/* Registers memory, stores a handle and returns 0, or returns a code; and ends a registration. Of
 * the forms of ncclCommRegister and ncclCommDeregister. Called within allocations and frees. */
typedef int (*aq_register_memory)(void *context, void *memory, size_t bytes, void **handle);
typedef int (*aq_unregister_memory)(void *context, void *handle);

/* Creates a pool. Its two functions, of the forms of aq_torch_alloc and aq_torch_free, are stored
 * in `functions[0]` and `functions[1]`, for torch._C._cuda_customAllocator. A free waits for the
 * stream of its allocation. Null for either of the others: nothing is called.
 * AQ_ERROR_NULL, _NO_DEVICE; _CAPACITY if 16 pools, or all streams, are in use. */
aq_status aq_registered_create(int device, uint64_t chunk_bytes, int exported,
                               aq_register_memory register_memory,
                               aq_unregister_memory unregister_memory, void *context,
                               uint64_t *pool, const void **functions);

/* Leaves registrations to the caller, for languages that must not be called within an allocation.
 * Before the first allocation. When a chunk has no part any more, `defer(call, pool)` is called by
 * any thread: Py_AddPendingCall is such a function. The caller unregisters the chunk and calls
 * aq_registered_release. Until then it stays, and is not used again.
 * AQ_ERROR_NULL, _CLOSED; _BUSY at a second call. */
typedef int (*aq_call)(void *pool);
typedef int (*aq_defer)(aq_call call, void *pool);
aq_status aq_registered_defer(uint64_t pool, aq_defer defer, aq_call call);

/* Stores the first chunk whose address is above `above`, and whether it waits for its release.
 * Stores 0 if there is none. The results may be null. AQ_ERROR_CLOSED. */
aq_status aq_registered_chunk(uint64_t pool, uint64_t above, uint64_t *address, uint64_t *bytes,
                              int *leaving);

/* Returns 1 if memory is a registered pool's, whose chunks count against the limit, else 0. */
uint32_t aq_registered_has(const void *memory);

/* Releases a chunk that the caller has unregistered (cuMemFree, which waits for the device).
 * AQ_ERROR_CLOSED, _FOREIGN_BLOCK; _BUSY while it has parts. */
aq_status aq_registered_release(uint64_t pool, uint64_t address);

/* Refuses further allocations. The pool ends with its last chunk. Not during an allocation.
 * AQ_ERROR_CLOSED. */
aq_status aq_registered_destroy(uint64_t pool);

/* ---- Sleep ---------------------------------------------------------------------------------- */

/* Memory that is given back while the process sleeps, at addresses that stay. A thread allocates it
 * in a region, which has a tag. Blocks of the region come from memory that no other tag shares, in
 * slots of 32 MiB, or less for small limits. They are used and freed like all others. Captured work
 * is served by the capture's pool as ever. */

/* Sets the region of this thread, until the next call. Null or an empty text: no region. Threads
 * begin in none. */
aq_status aq_torch_region(const char *tag);

/* Makes the memory of a pool of graphs (aq_torch_pool_begin) of this tag, before its first use.
 * Graphs that are captured with it can be launched again after the tag was parked and resumed. Does
 * nothing for a pool that is of the tag already.
 * AQ_ERROR_NULL; _BAD_ARGUMENT for a pool that has memory of another tag or of none; _PARKED;
 * _BUSY if the pool begins at the same time; _UNSUPPORTED; driver errors. */
aq_status aq_torch_pool_tag(int device, uint64_t first, uint64_t second, const char *tag);

/* What becomes of the contents. */
#define AQ_KEEP_NONE 0     /* dropped: unspecified after the resume */
#define AQ_KEEP_PAGEABLE 1 /* kept in pageable host memory */
#define AQ_KEEP_PINNED 2   /* kept in pinned host memory, or in pageable if that is refused */
#define AQ_KEEP_DISK 3     /* kept in files, apart from blocks below 128 KiB */

/* Parks the memory of `count` tags on all devices: waits for the devices, keeps or drops the
 * contents as `keep` says for each tag, and returns the physical memory to the driver and to the
 * budget. All tags are parked, or none. A tag that is parked already, or that no region has used,
 * is ignored. The returned bytes are stored in `*released`, which may be null. Blocks until all of
 * it is done.
 * The files of AQ_KEEP_DISK are in `folder`, which should be on a disk; null: in that for temporary
 * files (TMPDIR). They have no names and end with the process. They are written out, so that their
 * contents take no host memory that the kernel could need.
 * Until it is resumed, nothing may use the memory, not even by a launch of a graph. New blocks of
 * the tags and recorded uses are refused with AQ_ERROR_PARKED. Blocks may be freed.
 * AQ_ERROR_NULL, _BAD_ARGUMENT; _PARKED while another thread parks or resumes one of the tags;
 * _CAPTURING while a capture or a pool is open (aq_torch_pool_begin); _TIMED_OUT; _SYSTEM if there
 * is no host memory or space on the disk; _UNSUPPORTED on devices without virtual memory; driver
 * errors. Contents that an earlier resume retained may be gone then; all else is unchanged. */
aq_status aq_torch_pause(const char *const *tags, const uint32_t *keep, size_t count,
                         const char *folder, uint64_t *released);

/* Resumes them: takes physical memory for all of them from the budget and the driver, and copies
 * the contents back. If it does not fit, everything stays parked as it was. A tag that is not
 * parked is ignored. The bytes are stored in `*taken`, which may be null. Blocks until the contents
 * are there. Host memory and files are then freed, pinned memory to its pool (aq_pinned_trim).
 * If `retain` is not 0, they stay until the next pause or the free of their block.
 * AQ_ERROR_NULL, _BAD_ARGUMENT; _OUT_OF_MEMORY; _PARKED while another thread parks or resumes one
 * of the tags; driver errors. */
aq_status aq_torch_resume(const char *const *tags, size_t count, int retain, uint64_t *taken);

/* Stores the bytes of physical memory that regions and graph pools of the tag hold on all devices,
 * and 1 if it is parked. `held` and `paused` may be null.
 * AQ_ERROR_NULL, _BAD_ARGUMENT. */
aq_status aq_torch_tag(const char *tag, uint64_t *held, int *paused);

/* Copies the contents of `bytes` bytes at a device address into host memory: those of the last
 * pause, while it lasts, and after a resume that retains them. Stores 0 in `*found` if there are
 * none, or if the range is not all in one block, otherwise 1.
 * AQ_ERROR_NULL. */
aq_status aq_torch_backup(const void *memory, size_t bytes, void *into, int *found);

/* ---- ONNX Runtime, and other callers without streams ---------------------------------------- */

/* The functions for the options gpu_external_alloc and gpu_external_free of ONNX Runtime's CUDA
 * provider, over the same runtime; aq_torch_reset is its gpu_external_empty_cache. Between the two
 * calls work on any stream may use the block.
 * Allocates on the device whose primary context is current on the calling thread, or on the first
 * one. Blocks until work of other streams that used the memory is complete: in most cases there is
 * none. Returns null for 0 bytes and if there is no memory: aq_last_error() returns the text. */
void *aq_fenced_alloc(size_t size);

/* Waits for all work queued on the block's device (cuCtxSynchronize), and frees the block. Null is
 * ignored. If it fails, the block is still live.
 * AQ_ERROR_FOREIGN_BLOCK; driver errors, also while a graph is captured. */
aq_status aq_fenced_free(void *memory);

/* ---- Ledgers -------------------------------------------------------------------------------- */

/* Bytes of one memory that processes of one user share: a device, pinned memory, or any other. Each
 * process is a member, and claims bytes before it takes them. The sum of all claims never exceeds
 * the capacity of the memory. The memberships of a process end with it, also by SIGKILL, by the
 * kernel's hand. A claim is an account and no memory. A runtime with AQ_SHARED_DEVICES is a member
 * by itself; these functions are for programs that take the memory in another way, or lend it.
 *
 *     aq_ledger_options terms = {0};
 *     terms.size = sizeof terms;
 *     terms.name = "my-memory";
 *     terms.capacity = 80ull << 30;
 *     terms.guarantee = 20ull << 30;
 *     aq_member member;
 *     if (aq_ledger_join(&terms, &member)) fail(aq_last_error());
 *     if (aq_ledger_claim(member, 30ull << 30, 0)) fail(aq_last_error());
 *     aq_ledger_release(member, 10ull << 30);
 *     aq_ledger_leave(member);
 *
 * Each ledger is a file of its name in a folder. A folder of null is that of AQUIFER_LEDGER, by
 * default `aquifer` in XDG_RUNTIME_DIR, or /tmp/aquifer-UID: AQ_ERROR_BAD_SETTING if AQUIFER_LEDGER
 * is `off` or no path. It belongs to the user, with mode 0700, and is created with the first
 * ledger. A name has at most 128 letters, digits, '.', '-' and '_'. A folder or a file that is not
 * safe to use, or is no ledger, gives AQ_ERROR_SYSTEM. */

typedef uint64_t aq_member; /* never 0, and never reused */

/* The terms of a membership. Zero selects the default of each field. */
typedef struct aq_ledger_options {
    size_t size;        /* sizeof(aq_ledger_options) */
    const char *folder; /* the folder of the ledgers; null: that of AQUIFER_LEDGER */
    const char *name;   /* the memory, such as aq_ledger_of_device returns it; required */
    uint64_t capacity;  /* bytes of the memory. The first member sets it; those that join later
                           with less are limited to that. 0: the ledger must exist */
    uint64_t guarantee; /* a claim up to this sum comes before those of others beyond their
                           guarantees. Bytes that are not claimed are lent */
    uint64_t limit;     /* the most that this member claims; 0: the capacity. Limits that
                           administrators set for the process on the memory, in its control groups
                           and in CUDA_MPS_PINNED_DEVICE_MEM_LIMIT, count beside it */
    int32_t priority;   /* beyond guarantees, waiting members of higher priority come first */
    uint32_t reserve;   /* nonzero: the guarantee is not lent */
} aq_ledger_options;

/* Joins a ledger, and stores the membership in `*member`. A process may be several members. May
 * block for up to a second while others join.
 * AQ_ERROR_NULL, _VERSION; _BAD_SETTING, also for a limit of an administrator that cannot be read;
 * _BAD_ARGUMENT for a bad name, or a guarantee above the limit, also an administrator's;
 * _OUT_OF_BUDGET if the guarantees of all members would exceed the capacity; _CAPACITY if there are
 * 256 members; _BUSY if another process kept the ledger locked; _SYSTEM. */
aq_status aq_ledger_join(const aq_ledger_options *options, aq_member *member);

/* Ends a membership, with its claims. A claim of another thread that waits ends first.
 * AQ_ERROR_BAD_ARGUMENT, _CLOSED. */
aq_status aq_ledger_leave(aq_member member);

/* Claims `bytes`, or nothing. With a `wait_ns` above 0 it blocks for up to that long, asks the
 * other members to give back what they hold beyond their guarantees, and has what they release
 * kept for this claim. Claims within guarantees come first, then higher priorities, then earlier
 * claims. 0 bytes always fit.
 * AQ_ERROR_OUT_OF_BUDGET if the limit or the capacity excludes it, at once; _OUT_OF_MEMORY if
 * others hold the bytes; _BAD_ARGUMENT; _CLOSED, also in a child of fork(). */
aq_status aq_ledger_claim(aq_member member, uint64_t bytes, uint64_t wait_ns);

/* Releases claimed bytes, and wakes members that wait. Never blocks.
 * AQ_ERROR_BAD_ARGUMENT for more than is claimed; _CLOSED. */
aq_status aq_ledger_release(aq_member member, uint64_t bytes);

/* Stores what the member has claimed, the most that it can claim, what a claim could take now, and
 * what others wait for that it holds beyond its guarantee. Each pointer may be null. Also writes
 * the member's part of the file anew, in case another program has written over it.
 * AQ_ERROR_BAD_ARGUMENT, _CLOSED. */
aq_status aq_ledger_member(aq_member member, uint64_t *claimed, uint64_t *limit, uint64_t *room,
                           uint64_t *owed);

/* Records the bytes of the memory that all processes use, as its driver counts them. What is not
 * claimed of that is unaccounted, and taken from the capacity. It becomes less only by two records
 * between which no claim has changed.
 * AQ_ERROR_BAD_ARGUMENT, _CLOSED. */
aq_status aq_ledger_measure(aq_member member, uint64_t in_use);

/* Returns the figures of a ledger, which must exist, as one JSON object: {"format":
 * "aquifer-ledger", "version": 1, "name", "capacity", "claimed", "free", "unaccounted", "members":
 * [{"process", "command", "claimed", "guarantee", "reserved", "limit", "priority", "reclaimable",
 * "wanted"}]}, with the live members only. Joins nothing, and makes a system call for each member.
 * Later versions add fields. Free the text with aq_text_free.
 * AQ_ERROR_NULL, _BAD_ARGUMENT, _BAD_SETTING, _SYSTEM. */
aq_status aq_ledger_figures(const char *folder, const char *name, char **json);

/* Returns the names of the ledgers of a folder as a JSON list of texts. Free it with aq_text_free.
 * AQ_ERROR_NULL, _BAD_SETTING, _SYSTEM. */
aq_status aq_ledger_names(const char *folder, char **json);

/* Return the name of the ledger by which processes share a device, or pinned memory, and store the
 * capacity that runtimes join it with, in bytes. Free the name with aq_text_free. `capacity` may be
 * null.
 * AQ_ERROR_NULL, _BAD_RUNTIME, _CLOSED, _NO_DEVICE. */
aq_status aq_ledger_of_device(aq_runtime runtime, uint32_t device, char **name,
                              uint64_t *capacity);
aq_status aq_ledger_of_pinned(aq_runtime runtime, char **name, uint64_t *capacity);

/* ---- The simulated device, for tests -------------------------------------------------------- */

/* Each function returns AQ_ERROR_UNSUPPORTED for a runtime whose devices are not simulated. */

/* Create and destroy a stream as another library would. It is never NULL, 1 or 2. */
aq_status aq_sim_stream_create(aq_runtime runtime, uint32_t device, void **stream);
aq_status aq_sim_stream_destroy(aq_runtime runtime, uint32_t device, void *stream);

/* Makes work queued on `stream` from now on wait for all work queued on `other` so far. */
aq_status aq_sim_stream_wait(aq_runtime runtime, uint32_t device, void *stream, void *other);

/* Blocks until the work queued on the stream is complete. */
aq_status aq_sim_stream_synchronize(aq_runtime runtime, uint32_t device, void *stream);

/* Begin a capture on the stream in global mode; end it and create a graph; launch the graph on a
 * stream; destroy the graph. */
aq_status aq_sim_capture_begin(aq_runtime runtime, uint32_t device, void *stream);
aq_status aq_sim_capture_end(aq_runtime runtime, uint32_t device, void *stream, uint64_t *graph);
aq_status aq_sim_graph_launch(aq_runtime runtime, uint32_t device, uint64_t graph, void *stream);
aq_status aq_sim_graph_destroy(aq_runtime runtime, uint32_t device, uint64_t graph);

/* Queues a kernel that accesses `bytes` from `address` on. If `address` is the start of a live
 * block, the access is checked against that block. */
aq_status aq_sim_touch(aq_runtime runtime, uint32_t device, void *stream, uint64_t address,
                       uint64_t bytes, uint32_t access);

/* Stores the number of invalid accesses so far: unordered ones, and accesses to memory of another
 * owner. `*report`, if `report` is not null, gets one line for each: free it with aq_text_free. */
aq_status aq_sim_violations(aq_runtime runtime, uint64_t *count, char **report);

/* Loses a device, as after a sticky error. */
aq_status aq_sim_lose(aq_runtime runtime, uint32_t device);

/* Panics inside the library: returns AQ_ERROR_PANIC and does nothing else. */
aq_status aq_sim_panic(aq_runtime runtime);

#ifdef __cplusplus
}
#endif

#endif
