/* aquifer for C and C++: device memory cached per stream, pinned host memory, and staging between the two.
 *
 * This file is the interface's document. It is C11 and C++17, and includes nothing but <stddef.h> and <stdint.h>.
 *
 *     aq_runtime_options options = {0};          // aq_runtime_options options{} in C++
 *     options.size = sizeof options;
 *     aq_runtime rt;
 *     if (aq_runtime_create(&options, &rt)) fail(aq_last_error());
 *     uint64_t x;
 *     if (aq_alloc(rt, 0, 1 << 20, stream, &x)) fail(aq_last_error());
 *     kernel<<<1, 1, 0, stream>>>((float *)x);
 *     aq_free(rt, 0, x);                         // no wait: what comes next on the stream may have it
 *     aq_runtime_destroy(rt);
 *
 * Units.      Sizes, offsets and limits are bytes; times are nanoseconds.
 *
 * Errors.     A call answers with AQ_OK, which is 0, or with a code of `aq_status`. A call that answers with an error has
 *             changed nothing, unless it says so. Codes keep their numbers, and later versions add some: treat one that you
 *             do not know like AQ_ERROR_OTHER. aq_last_error() has the text. Nothing unwinds out of the library: what would
 *             is AQ_ERROR_PANIC, a bug, after which the library still works.
 *
 * Blocking.   A function blocks only where it says so.
 *
 * Threads.    Every function may be called by any number of threads at once, and none needs a thread to be known.
 *             Not from a signal handler, and in a child of fork() only in order to call exec.
 *
 * Ownership.  Runtimes and tickets are numbers, not pointers, and no number is given twice: one that is over answers with
 *             AQ_ERROR_CLOSED or AQ_ERROR_UNKNOWN_TICKET, whoever uses it. Device blocks are addresses. Things may be
 *             destroyed in any order: a block that is still out when its runtime is destroyed stays good and can be freed,
 *             and its memory goes back to the driver with the last of them.
 *
 * Streams.    A `void *stream` is the driver's handle: `CUstream` or `cudaStream_t`. NULL and 1 are the device's legacy
 *             default stream; 2 is the default stream of the calling thread, and each thread's is another. It must be a
 *             stream of the device that is named beside it, in its primary context, and alive during the call. (The
 *             simulated driver refuses what is none; CUDA may crash.)
 *             How long it stays alive matters, because memory that was freed on it is ordered with it later:
 *               - of a stream that nothing is said of (AQ_STREAMS_UNTOLD) an event is recorded at each free and at each
 *                 use that is noted, while it is surely there, and each call asks the driver whether the handle is still
 *                 the same stream: 0.2 us. Blocks that were allocated for it must be freed before it is destroyed;
 *               - of one that is registered (aq_stream_register), or whose runtime was made with AQ_STREAMS_RETIRED, it is
 *                 believed that aq_stream_retire is called before it is destroyed. Nothing is recorded or asked.
 *             Blocks of a per-thread default stream should be freed by its own thread; what another thread frees is held
 *             back until its own comes by.
 *
 * Devices.    A `uint32_t device` counts the runtime's devices from 0: the driver's own order.
 *
 * Structs     begin with `size`, which the caller sets to sizeof. So they can grow: a library that knows more fields than
 *             its caller takes the rest for zero and fills what is there; one that knows fewer refuses fields that are not
 *             zero with AQ_ERROR_VERSION, and says in `size` how much it has filled.
 *
 * Linking.    cc program.c -laquifer_ffi, or statically libaquifer_ffi.a -lpthread -ldl -lm. CUDA is opened at run time:
 *             neither the program nor the library links to it. All exported names begin with aq_. Two versions in one
 *             process: dlopen each with RTLD_LOCAL, which keeps their names and their runtimes apart; do not link both, nor
 *             free by one what the other gave. dlclose unloads nothing: threads may be on their way in the library.
 *
 * Environment. What the library's own documentation lists is respected: AQUIFER_TRACE, AQUIFER_BYPASS, AQUIFER_DEBUG.
 *             A value that cannot be followed is AQ_ERROR_BAD_SETTING from aq_runtime_create.
 */
#ifndef AQUIFER_H
#define AQUIFER_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The version of this header. With the same major version nothing that is here changes or goes; while it is 0, with the same
 * minor version too. */
#define AQ_VERSION_MAJOR 0
#define AQ_VERSION_MINOR 3

/* The version of the library that is loaded: major << 16 | minor. */
uint32_t aq_version(void);

/* ---- Errors ------------------------------------------------------------------------------------------------------- */

typedef int32_t aq_status;
enum {
    AQ_OK = 0,
    AQ_NOT_READY = 1,              /* not yet; no error, and no text */
    AQ_ERROR_NULL = 2,             /* a pointer that is needed is null */
    AQ_ERROR_BAD_ARGUMENT = 3,     /* an argument that has no meaning */
    AQ_ERROR_VERSION = 4,          /* a struct whose size or fields this version does not know */
    AQ_ERROR_BAD_RUNTIME = 5,      /* never was a runtime */
    AQ_ERROR_CLOSED = 6,           /* a runtime that has been destroyed */
    AQ_ERROR_ZERO_SIZE = 7,        /* a block of no bytes */
    AQ_ERROR_TOO_LARGE = 8,        /* more than anything could hold */
    AQ_ERROR_BAD_ALIGNMENT = 9,    /* no power of two, or more than the memory has */
    AQ_ERROR_OUT_OF_MEMORY = 10,   /* everything was tried; the text says what was there, who holds it, and what to do */
    AQ_ERROR_OUT_OF_BUDGET = 11,   /* a limit refused, and nothing was tried to make room */
    AQ_ERROR_DRIVER = 12,          /* the driver refused; the text has its call and code */
    AQ_ERROR_SYSTEM = 13,          /* the kernel refused */
    AQ_ERROR_DEVICE_LOST = 14,     /* a sticky error; only the application may reset the device */
    AQ_ERROR_NO_DEVICE = 15,       /* no device of this number */
    AQ_ERROR_WRONG_DEVICE = 16,    /* a block of another device */
    AQ_ERROR_FOREIGN_BLOCK = 17,   /* no block that is out */
    AQ_ERROR_DOUBLE_FREE = 18,     /* a block that has been freed */
    AQ_ERROR_OUT_OF_BOUNDS = 19,   /* bytes beyond the end of a block */
    AQ_ERROR_BUSY = 20,            /* a use under way that excludes this one */
    AQ_ERROR_CAPACITY = 21,        /* as many of the library's own streams are in use as there may be */
    AQ_ERROR_CAPTURING = 22,       /* the stream captures a graph, so nobody can wait for it */
    AQ_ERROR_UNKNOWN_STREAM = 23,  /* no stream, or none that has been seen */
    AQ_ERROR_OTHER_THREAD = 24,    /* the default stream of another thread */
    AQ_ERROR_UNSUPPORTED = 25,     /* the driver or the device lacks it */
    AQ_ERROR_TIMED_OUT = 26,       /* a deadline passed */
    AQ_ERROR_BAD_SETTING = 27,     /* an option or a variable of the environment that cannot be followed */
    AQ_ERROR_STAGING = 28,         /* a transfer did not come to its end */
    AQ_ERROR_CANCELLED = 29,       /* a transfer was cancelled */
    AQ_ERROR_UNKNOWN_TICKET = 30,  /* no ticket, or one that has been freed */
    AQ_ERROR_PANIC = 31,           /* a bug of the library; it still works */
    AQ_ERROR_OTHER = 32            /* none of these */
};

/* The name of a status, such as "AQ_ERROR_NULL". Never null, and stays. */
const char *aq_status_name(aq_status status);

/* Why the calling thread's last failing call failed, in lines for a person: of AQ_ERROR_OUT_OF_MEMORY the whole account.
 * "" if none has failed. Never null. Good until the thread's next failing call, or its end. */
const char *aq_last_error(void);

/* Gives back a text that a function here said to give back. Null is none. */
void aq_text_free(char *text);

/* ---- Runtimes ----------------------------------------------------------------------------------------------------- */

typedef uint64_t aq_runtime; /* never 0 */

enum {
    AQ_DRIVER_MACHINE = 0,       /* the machine's CUDA driver; without one there are no devices, and host memory all the same */
    AQ_DRIVER_SIM = 1,           /* a simulated device, which checks every access: for tests */
    AQ_DRIVER_MACHINE_OR_SIM = 2 /* the first, and where there is no driver the second */
};
enum {
    AQ_STREAMS_UNTOLD = 0, /* streams may be destroyed without a word */
    AQ_STREAMS_RETIRED = 1 /* aq_stream_retire is called before any stream is destroyed */
};
enum {
    AQ_SIM_PLAIN = 1,    /* simulated devices without virtual memory management */
    AQ_SIM_UNCHECKED = 2 /* that check nothing: to measure */
};

/* Zero is the default of each field. */
typedef struct aq_runtime_options {
    size_t size;                /* sizeof(aq_runtime_options) */
    uint32_t driver;            /* AQ_DRIVER_... */
    uint32_t streams;           /* AQ_STREAMS_..., of streams that are not registered */
    uint32_t sim_devices;       /* how many simulated devices; 0: one */
    uint32_t sim_flags;         /* AQ_SIM_..., any of them */
    uint64_t sim_memory;        /* bytes of each; 0: 16 GiB, of which the host backs what is written */
    uint64_t sim_seed;          /* not 0: queued work runs late, and in an order by this seed; 0: at once */
    uint64_t device_limit;      /* bytes of each device at most; 0: four fifths of what is free now */
    uint64_t pinned_limit;      /* bytes of pinned memory at most; 0: half of what the host or its control group has */
    uint64_t wait_ns;           /* how long an allocation waits for memory that is still in use; 0: 10 s */
    uint64_t release_threshold; /* idle bytes of each device above which memory goes back to the driver; 0: no bound */
    uint64_t history;           /* how many of the last events are kept for aq_memory_snapshot, 64 bytes each, 2^24 of them at
                                   most; 0: none. Costs an allocation and its free up to 0.5 us. Not beside AQUIFER_TRACE
                                   (AQ_ERROR_BAD_SETTING) */
} aq_runtime_options;

/* Makes a runtime: opens the driver, makes a context for each device (the driver's own time for that), reads the machine's
 * topology. Takes no memory and starts no thread. `options` may be null.
 * AQ_ERROR_NULL, _BAD_ARGUMENT, _VERSION, _BAD_SETTING, _DRIVER. That there is no GPU is no error. */
aq_status aq_runtime_create(const aq_runtime_options *options, aq_runtime *runtime);

/* Destroys a runtime. What is free goes back to the driver at once, as far as that needs no wait of the device's; blocks that
 * are out stay good until they are freed, and tickets until they are. Every other call for this runtime answers with
 * AQ_ERROR_CLOSED from now on. A thread that has used the runtime keeps its books, not its memory, until it calls the library
 * for another one or ends. May block, for as long as the driver takes. */
aq_status aq_runtime_destroy(aq_runtime runtime);

/* ---- Devices ------------------------------------------------------------------------------------------------------ */

typedef struct aq_device_facts {
    size_t size;             /* sizeof(aq_device_facts), set by the caller */
    uint64_t memory;         /* bytes of memory */
    uint64_t free_memory;    /* bytes that nobody holds now, as the driver says: advice */
    uint64_t granularity;    /* bytes of a physical handle; 0 without virtual memory management */
    uint32_t ordinal;        /* the driver's number */
    uint32_t major;          /* compute capability: 9 of 9.0 */
    uint32_t minor;          /* and 0 of it */
    int32_t node;            /* the NUMA node whose memory is near; -1 where nobody tells */
    uint32_t simulated;      /* not 0: simulated */
    uint32_t virtual_memory; /* not 0: has virtual memory management */
    char name[128];          /* cut to fit, ended by a zero */
    char pci_address[32];    /* likewise; "" where it is not known */
} aq_device_facts;

/* How many devices the runtime has. */
aq_status aq_device_count(aq_runtime runtime, uint32_t *count);

/* What a device is. One driver call (cuMemGetInfo, 4 us). */
aq_status aq_device(aq_runtime runtime, uint32_t device, aq_device_facts *facts);

/* ---- Device memory ------------------------------------------------------------------------------------------------ */

/* A block of `bytes`, at a multiple of 512, that work queued on `stream` from now on may use. Mostly no driver call and no
 * wait. When the stream's own cache has no room, room is made in several steps: what others have freed, new memory, other
 * pools; the last of them blocks until memory that is in use comes back, for `wait_ns` at most.
 * The address goes to `*address`, which an error leaves as it is.
 * AQ_ERROR_NULL, _ZERO_SIZE, _TOO_LARGE, _OUT_OF_MEMORY, _NO_DEVICE, _UNKNOWN_STREAM, _DEVICE_LOST, _DRIVER. */
aq_status aq_alloc(aq_runtime runtime, uint32_t device, uint64_t bytes, void *stream, uint64_t *address);

/* The same at a multiple of `align`, a power of two up to 2 MiB. Also AQ_ERROR_BAD_ALIGNMENT. */
aq_status aq_alloc_aligned(aq_runtime runtime, uint32_t device, uint64_t bytes, uint64_t align, void *stream,
                           uint64_t *address);

/* Frees a block in the order of the stream that it was allocated for: work queued there before still has it, and work queued
 * there after may be given it. Other streams that used it must have been noted (aq_record_use). Any thread may free it.
 * No wait, and no driver call but for a stream that is not registered. 0 is no block and frees nothing.
 * AQ_ERROR_FOREIGN_BLOCK, _DOUBLE_FREE, _WRONG_DEVICE: nothing was freed, and nothing is lost. A block that was freed while
 * memory moved on may be told as foreign. Frees blocks of a runtime that has been destroyed as well. */
aq_status aq_free(aq_runtime runtime, uint32_t device, uint64_t address);

/* Which access: or both, AQ_READ | AQ_WRITE. */
enum { AQ_READ = 1, AQ_WRITE = 2 };

/* Notes that work which has been queued on `stream` by now uses the block: its memory goes to nobody before that work is
 * done. Call it after the launch; that `stream` waited for the block's own stream before is the caller's business
 * (cudaStreamWaitEvent). For the block's own stream it does nothing. No wait.
 * AQ_ERROR_FOREIGN_BLOCK, _DOUBLE_FREE, _WRONG_DEVICE, _BAD_ARGUMENT, _UNKNOWN_STREAM, _CAPTURING. */
aq_status aq_record_use(aq_runtime runtime, uint32_t device, uint64_t address, void *stream, uint32_t access);

/* Both: notes that `stream` has read and written the block, and frees it. The runtime must be open. */
aq_status aq_free_on(aq_runtime runtime, uint32_t device, uint64_t address, void *stream);

/* The bytes that were asked for, and those that the block has. Either pointer may be null. */
aq_status aq_block_size(aq_runtime runtime, uint32_t device, uint64_t address, uint64_t *asked, uint64_t *capacity);

/* Free memory back to the driver until the device's pool holds no more than `keep` bytes, as far as that needs no waiting.
 * The bytes that went go to `*given`, which may be null. May take the driver milliseconds. */
aq_status aq_trim(aq_runtime runtime, uint32_t device, uint64_t keep, uint64_t *given);

/* ---- Streams ------------------------------------------------------------------------------------------------------ */

/* Promises that aq_stream_retire is called for this stream before it is destroyed: frees on it are then cheap. Default streams
 * need no promise. For a stream that has been used without one it blocks until what is queued there is done. */
aq_status aq_stream_register(aq_runtime runtime, uint32_t device, void *stream);

/* The stream is about to be destroyed by its owner. Blocks until what is queued there is done. Its blocks stay good, and what
 * was free on it serves other streams. Blocks should be freed before: what is freed later is in order with its past only.
 * AQ_ERROR_UNKNOWN_STREAM if the runtime knows nothing of the stream: then there is nothing to be done, and it may go. */
aq_status aq_stream_retire(aq_runtime runtime, uint32_t device, void *stream);

/* ---- Limits and statistics ---------------------------------------------------------------------------------------- */

/* What the device may hold at most, and holds. Either pointer may be null. */
aq_status aq_limit(aq_runtime runtime, uint32_t device, uint64_t *limit, uint64_t *used);

/* Sets the limit. Below what is held nothing is taken away: allocations that need more are refused until enough has come back,
 * by frees and aq_trim. What is held above it goes to `*excess`, which may be null. */
aq_status aq_set_limit(aq_runtime runtime, uint32_t device, uint64_t limit, uint64_t *excess);

/* The same for all pinned memory of the runtime. */
aq_status aq_pinned_limit(aq_runtime runtime, uint64_t *limit, uint64_t *used);
aq_status aq_set_pinned_limit(aq_runtime runtime, uint64_t limit, uint64_t *excess);

/* Bytes, unless it says a count. live + cached + pending is what blocks and caches span. */
typedef struct aq_stats {
    size_t size;             /* sizeof(aq_stats), set by the caller */
    uint64_t live;           /* in blocks that are out, as they were rounded */
    uint64_t requested;      /* the same, as they were asked for */
    uint64_t cached;         /* free, and can be given out again */
    uint64_t pending;        /* freed, and held back until a use on another stream is done */
    uint64_t physical;       /* held from the driver or the kernel; what the limit bounds */
    uint64_t peak_live;      /* the most that `live` has been, or the sum of the streams' peaks, which is no less */
    uint64_t peak_requested; /* likewise */
    uint64_t peak_physical;  /* the most that `physical` has been */
    uint64_t blocks;         /* a count: blocks that are out */
    uint64_t allocations;    /* a count: that succeeded */
    uint64_t frees;          /* a count */
    uint64_t failures;       /* a count: allocations that failed */
    uint64_t growths;        /* a count: how often memory was taken from the driver or kernel */
    uint64_t reaped;         /* given back to the driver or kernel so far */
    uint64_t moves;          /* a count: physical handles moved */
    uint64_t adoptions;      /* a count: ranges that one stream took over from another */
    uint64_t fences;         /* a count: events recorded */
    uint64_t stream_waits;   /* a count: waits of one stream for another */
    uint64_t host_waits;     /* a count: waits of the host */
} aq_stats;

/* What the pool of a device holds. No driver call; each field is right, and they may be of moments apart. */
aq_status aq_device_stats(aq_runtime runtime, uint32_t device, aq_stats *stats);

/* Counts the three peaks from what is held now. */
aq_status aq_reset_peaks(aq_runtime runtime, uint32_t device);

/* What the pool of pinned memory near a device holds. */
aq_status aq_pinned_stats(aq_runtime runtime, uint32_t device, aq_stats *stats);

/* All that the runtime knows of itself as one JSON object: {"format": "aquifer-snapshot", "version": 1, "driver", "devices":
 * [{"ordinal", "name", "memory", "budget", "stats", "findings", ...}], "pinned_budget", "pinned": [{"node", "stats",
 * "regions"}]}. Later versions add fields. Give the text back with aq_text_free. */
aq_status aq_snapshot(aq_runtime runtime, char **json);

/* Writes to the file at `path`, which is made or made anew, what the pool of a device did last and which blocks are out,
 * however old (those of graphs as long as they are among the events): the pickle that torch.cuda.memory._dump_snapshot()
 * writes, for https://pytorch.org/memory_viz, `python -m torch.cuda._memory_viz` and `aquifer replay`. What was kept stays, so
 * the next one tells it again. Blocks for as long as the file system takes.
 * AQ_ERROR_NULL, _NO_DEVICE; _UNSUPPORTED for a runtime that was made without `history`; _SYSTEM, after which a part of the
 * file may be there. */
aq_status aq_memory_snapshot(aq_runtime runtime, uint32_t device, const char *path);

/* ---- Pinned host memory ------------------------------------------------------------------------------------------- */

/* A block of pinned host memory on the NUMA node that the device is near, or on no node in particular where there is no such
 * device. `align` is a power of two, or 0 for 64. Not zeroed. Where the memory cannot be pinned it is pageable, and
 * aq_pinned_is_pinned tells. Blocks while the pool grows (from 10 ms a GiB), which also holds up launches of kernels.
 * AQ_ERROR_NULL, _ZERO_SIZE, _TOO_LARGE, _BAD_ALIGNMENT, _OUT_OF_MEMORY. */
aq_status aq_pinned_alloc(aq_runtime runtime, uint32_t device, uint64_t bytes, uint64_t align, void **memory);

/* Frees it, from any thread, also after its runtime has been destroyed. Queued copies that still use it must have been noted
 * (aq_pinned_record_use) or waited for. Null frees nothing. AQ_ERROR_FOREIGN_BLOCK for what is not out, or no longer. */
aq_status aq_pinned_free(void *memory);

/* Whether devices reach the block without staging: 1 or 0. */
aq_status aq_pinned_is_pinned(void *memory, int *pinned);

/* Notes that work which has been queued on `stream` by now uses the block: when it is freed, it goes to nobody before that
 * work is done. No wait. */
aq_status aq_pinned_record_use(void *memory, aq_runtime runtime, uint32_t device, void *stream);

/* Gives free pinned memory back to the kernel while `keep` free bytes stay. For quiet moments: blocks until the devices are
 * idle. The bytes that went go to `*given`, which may be null. */
aq_status aq_pinned_trim(aq_runtime runtime, uint32_t device, uint64_t keep, uint64_t *given);

/* ---- Staging ------------------------------------------------------------------------------------------------------ */

/* Copies `bytes` of pageable (or any) host memory to a block of the library's, from `offset` on, through pinned slots and at
 * the speed of the link. The copy comes after all that is queued on `stream` now, and after uses of the block that have been
 * noted. Blocks until it is done, so all that is queued later, anywhere, comes after it.
 * The first one for a device takes some MiB of pinned memory, and large ones start threads.
 * Nothing at all for 0 bytes.
 * AQ_ERROR_NULL, _FOREIGN_BLOCK, _DOUBLE_FREE, _WRONG_DEVICE, _OUT_OF_BOUNDS, _BUSY, _UNKNOWN_STREAM, _CAPTURING, _STAGING,
 * and the driver's. After an error some of the bytes may have been copied. */
aq_status aq_upload(aq_runtime runtime, uint32_t device, uint64_t block, uint64_t offset, const void *host, uint64_t bytes,
                    void *stream);

/* The other way round. */
aq_status aq_download(aq_runtime runtime, uint32_t device, uint64_t block, uint64_t offset, void *host, uint64_t bytes,
                      void *stream);

typedef uint64_t aq_ticket; /* never 0 */

/* The same without waiting for the copy: it is begun, and `*ticket` stands for it. The host memory stays as it is, and
 * nobody's else, until the ticket has been waited for or freed. What is queued after aq_ticket_wait, or after aq_ticket_poll
 * has answered AQ_OK, comes after the copy; what is queued before need not, not even on `stream`. The block may be freed
 * meanwhile: it goes home when the copy is done. Blocks while as many transfers are under way as may be (16). */
aq_status aq_upload_begin(aq_runtime runtime, uint32_t device, uint64_t block, uint64_t offset, const void *host,
                          uint64_t bytes, void *stream, aq_ticket *ticket);
aq_status aq_download_begin(aq_runtime runtime, uint32_t device, uint64_t block, uint64_t offset, void *host,
                            uint64_t bytes, void *stream, aq_ticket *ticket);

/* Whether the copy is done: AQ_OK, AQ_NOT_READY, or what ended it early. Never blocks. */
aq_status aq_ticket_poll(aq_ticket ticket);

/* Blocks until the copy has ended, and takes part in it. AQ_OK, or what ended it early. May be called again. */
aq_status aq_ticket_wait(aq_ticket ticket);

/* Lets go of a ticket. A copy that has not ended is cancelled, and waited for: blocks for about a chunk of it. Every ticket
 * is to be freed, once. 0 is none. */
aq_status aq_ticket_free(aq_ticket ticket);

/* ---- PyTorch ------------------------------------------------------------------------------------------------------ */

/* What torch.cuda.memory.CUDAPluggableAllocator and its hooks call, over one runtime of the process. It is made at the first
 * of these calls, on the machine's driver with AQ_STREAMS_RETIRED, since PyTorch keeps its streams for good; one that
 * PyTorch does not own (ExternalStream) is to be retired before it is destroyed. The runtime is aq_torch_runtime's: for
 * limits, statistics and snapshots. `python/aquifer_torch` sets all of this up.
 * PyTorch's own class expects nothing from its hooks and ignores the codes; what fails in aq_torch_alloc is null, and
 * aq_last_error() has the text. Set the record_stream hook: without one PyTorch's record_stream says nothing to anybody. */

/* Makes it with other options, before PyTorch's first allocation. AQ_ERROR_BUSY if there is one that is open. */
aq_status aq_torch_setup(const aq_runtime_options *options);
aq_status aq_torch_runtime(aq_runtime *runtime);

/* `init`: makes the runtime. */
aq_status aq_torch_init(int device_count);

/* `alloc` (alloc_fn_name): null for 0 bytes, and where there is no memory. */
void *aq_torch_alloc(ptrdiff_t size, int device, void *stream);

/* The same with a code, for callers that raise errors: null in `*memory` for 0 bytes. As aq_alloc. */
aq_status aq_torch_malloc(ptrdiff_t size, int device, void *stream, void **memory);

/* `free` (free_fn_name): in the order of the stream that it was allocated for, and behind all that is queued by now on the
 * streams that it was recorded on. A device of -1 is whichever the block is of. */
aq_status aq_torch_free(void *memory, ptrdiff_t size, int device, void *stream);

/* `record_stream`: unlike aq_record_use it covers what is queued on `stream` until the block is freed, as PyTorch has it. */
aq_status aq_torch_record_stream(void *memory, void *stream);

/* `base_alloc`: the block that begins at `memory`, and its bytes in `*size`; null for any other address. */
void *aq_torch_base_alloc(void *memory, size_t *size);

/* `memory_fraction`: limits a device to this part of its memory, 0 to 1. */
aq_status aq_torch_memory_fraction(double fraction, int device);

/* `reset`, which torch.cuda.empty_cache() calls: free memory of all devices back to the driver. */
aq_status aq_torch_reset(void);

/* Memory of captured graphs, by the two numbers that PyTorch names a pool by. What is allocated from `begin` to `end` for a
 * stream that captures, and that the filter says belongs, comes out of the pool, and nobody else gets it while the pool has
 * users or blocks. Each `begin` and `retain` is a user, and each `release` is the end of one. Until the last of them a graph may
 * be replayed any number of times, on any streams; afterwards the memory goes back at the next aq_torch_reset, aq_trim or lack
 * of memory, and since nobody tells when graphs are launched, that waits for the device. */

/* Not zero: work on `stream` belongs. Called by any thread that allocates meanwhile, for streams that capture; it must not
 * allocate, and nothing may unwind out of it. */
typedef int (*aq_torch_filter)(void *data, void *stream);
typedef void (*aq_torch_drop)(void *data);

/* `begin`, right before the capture does: also makes the pool, whose memory comes as it is needed. `data` is the library's from
 * now on: `drop(data)` is called once, when the filter is called no more, and at once if this fails. AQ_ERROR_BUSY if the pool
 * has begun already. */
aq_status aq_torch_pool_begin(int device, uint64_t first, uint64_t second, aq_torch_filter filter, void *data,
                              aq_torch_drop drop);

/* `end`, after the capture has ended. AQ_ERROR_BAD_ARGUMENT if nothing has begun. */
aq_status aq_torch_pool_end(int device, uint64_t first, uint64_t second);

/* A user more, who begins nothing: also makes the pool. */
aq_status aq_torch_pool_retain(int device, uint64_t first, uint64_t second);

/* `release`: a user less. Never blocks. AQ_ERROR_BAD_ARGUMENT if there is no such pool. */
aq_status aq_torch_pool_release(int device, uint64_t first, uint64_t second);

/* How many users a pool has; 0 where there is none. */
aq_status aq_torch_pool_uses(int device, uint64_t first, uint64_t second, int *uses);

/* ---- CuPy --------------------------------------------------------------------------------------------------------- */

/* What cupy.cuda.CFunctionAllocator(stream, malloc_func, free_func, owner) calls, over the same runtime as PyTorch's. Its first
 * argument, of which CuPy knows nothing, is the stream: one allocator for each. Null where there is no memory, which CuPy does
 * not look at: limit what is asked for, or call aq_torch_malloc from cupy.cuda.PythonFunctionAllocator and raise. */
void *aq_cupy_alloc(void *stream, size_t size, int device);
void aq_cupy_free(void *stream, void *memory, int device);

/* ---- The simulated device, for tests ------------------------------------------------------------------------------ */

/* Each answers with AQ_ERROR_UNSUPPORTED for a runtime whose devices are not simulated. */

/* A stream as another library would make it, and its end. It is never NULL, 1 or 2. */
aq_status aq_sim_stream_create(aq_runtime runtime, uint32_t device, void **stream);
aq_status aq_sim_stream_destroy(aq_runtime runtime, uint32_t device, void *stream);

/* Makes work queued on `stream` from now on wait for all that is queued on `other` now. */
aq_status aq_sim_stream_wait(aq_runtime runtime, uint32_t device, void *stream, void *other);

/* Blocks until what is queued on the stream is done. */
aq_status aq_sim_stream_synchronize(aq_runtime runtime, uint32_t device, void *stream);

/* Opens a capture on the stream, in global mode; ends it, and makes a graph of it; launches that on a stream; destroys it. */
aq_status aq_sim_capture_begin(aq_runtime runtime, uint32_t device, void *stream);
aq_status aq_sim_capture_end(aq_runtime runtime, uint32_t device, void *stream, uint64_t *graph);
aq_status aq_sim_graph_launch(aq_runtime runtime, uint32_t device, uint64_t graph, void *stream);
aq_status aq_sim_graph_destroy(aq_runtime runtime, uint32_t device, uint64_t graph);

/* Queues a kernel that touches `bytes` from `address` on. At the start of a block that is out it is known whose it is. */
aq_status aq_sim_touch(aq_runtime runtime, uint32_t device, void *stream, uint64_t address, uint64_t bytes,
                       uint32_t access);

/* How many accesses were wrong so far: in no order with another, or to memory of another's. `*report`, if `report` is not
 * null, gets a line for each: give it back with aq_text_free. */
aq_status aq_sim_violations(aq_runtime runtime, uint64_t *count, char **report);

/* Loses a device, as a sticky error would. */
aq_status aq_sim_lose(aq_runtime runtime, uint32_t device);

/* Panics inside of the library: AQ_ERROR_PANIC, and nothing else. */
aq_status aq_sim_panic(aq_runtime runtime);

#ifdef __cplusplus
}
#endif

#endif
