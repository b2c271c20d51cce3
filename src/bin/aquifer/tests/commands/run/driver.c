// A stand-in for libcuda.so.1: it has memory, counts it as the driver does, and runs no work.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef unsigned Code;
typedef uint64_t Address;
enum { OK = 0, INVALID = 1, OOM = 2, NOT_INITIALIZED = 3, NO_CONTEXT = 201 };
enum { DEVICES = 2, BLOCKS = 8192, MIB = 1 << 20 };
static const size_t CAPACITY = 1024ul * MIB, PAGE = 2 * MIB;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int initialized;
static _Thread_local int current = -1;
static size_t used[DEVICES], peak[DEVICES];
// Small blocks divide pages; `kind` says what a block is: 1 its own pages, 2 a part of a page, 3 of a pool, 4 no memory yet.
static struct Block { Address address; size_t bytes; int device, kind; } blocks[BLOCKS];
static struct Page { Address address; int device, blocks; size_t next; } pages[BLOCKS];
static struct Pool { size_t live, reserved; int device; } pools[DEVICES];
static struct Handle { size_t bytes; int device, references, mappings; } handles[BLOCKS];
static struct Map { Address address; size_t bytes; int handle; } maps[BLOCKS];
static Address next_address = 0x700000000000;
static int capturing;

static size_t up(size_t n, size_t to) { return (n + to - 1) / to * to; }
// What is in use, and the most that was, with 100 MiB of the driver's own.
size_t stand_in_used(int device) { return used[device] + 100ul * MIB; }
size_t stand_in_peak(int device) { return peak[device] + 100ul * MIB; }

static int take_pages(int device, size_t bytes) {
    if (bytes > CAPACITY || used[device] + bytes > CAPACITY) return 0;
    used[device] += bytes;
    if (used[device] > peak[device]) peak[device] = used[device];
    return 1;
}
static struct Block *slot(Address address) {
    for (int i = 0; i < BLOCKS; i++) if (blocks[i].address == address) return &blocks[i];
    return 0;
}

Code cuInit(unsigned flags) { initialized = 1; return flags ? INVALID : OK; }
Code cuDriverGetVersion(int *v) { *v = 13000; return OK; }
Code cuDeviceGetCount(int *n) { if (!initialized) return NOT_INITIALIZED; *n = DEVICES; return OK; }
Code cuDeviceGet(int *d, int n) { *d = n; return n < DEVICES ? OK : 101; }
Code cuDeviceGetName(char *s, int len, int d) { snprintf(s, len, "Stand-in %d", d); return OK; }
// An old driver lacks functions that `aquifer run` uses and the program does not.
#ifndef OLD
Code cuDeviceGetPCIBusId(char *s, int len, int d) { snprintf(s, len, "0000:0%d:00.0", d + 1); return OK; }
Code cuDeviceGetUuid_v2(unsigned char *u, int d) { memset(u, d + 1, 16); return OK; }
Code cuDeviceGetDefaultMemPool(void **p, int d) { *p = &pools[d]; return OK; }
Code cuDeviceGetMemPool(void **p, int d) { *p = &pools[d]; return OK; }
Code cuDeviceGetGraphMemAttribute(int d, unsigned a, void *v) { (void)d; (void)a; *(uint64_t *)v = 0; return OK; }
static int ended[DEVICES];
Code cuDevicePrimaryCtxGetState(int d, unsigned *f, int *a) { *f = 0; *a = !ended[d]; return OK; }
Code cuStreamGetId(void *s, unsigned long long *id) { *id = (uintptr_t)s + 1; return OK; }
Code cuMemPoolGetAttribute(void *p, unsigned a, void *v) { *(uint64_t *)v = a == 5 ? ((struct Pool *)p)->reserved : 0; return OK; }
Code cuMemPoolTrimTo(void *handle, size_t keep) {
    (void)keep;
    pthread_mutex_lock(&lock);
    struct Pool *p = handle;
    size_t least = up(p->live, 32 * MIB);
    if (p->reserved > least) { used[p->device] -= p->reserved - least; p->reserved = least; }
    pthread_mutex_unlock(&lock);
    return OK;
}
#else
static int ended[DEVICES];
#endif
Code cuDeviceTotalMem_v2(size_t *n, int d) { (void)d; *n = CAPACITY; return OK; }
Code cuDevicePrimaryCtxRetain(void **c, int d) { *c = (void *)(uintptr_t)(0x1000 + d); ended[d] = 0; return OK; }
Code cuDevicePrimaryCtxReset_v2(int d) {
    for (int i = 0; i < BLOCKS; i++) if (blocks[i].address && blocks[i].device == d && blocks[i].kind == 1) {
        used[d] -= up(blocks[i].bytes, PAGE);
        blocks[i].address = 0;
    }
    ended[d] = 1;
    return OK;
}
Code cuCtxSetCurrent(void *c) { current = (int)((uintptr_t)c - 0x1000); return OK; }
Code cuCtxGetCurrent(void **c) { *c = current < 0 ? 0 : (void *)(uintptr_t)(0x1000 + current); return OK; }
Code cuCtxGetDevice(int *d) { if (current < 0) return NO_CONTEXT; *d = current; return OK; }
Code cuStreamIsCapturing(void *s, unsigned *status) { (void)s; *status = capturing; return OK; }
Code cuStreamBeginCapture_v2(void *s, unsigned mode) { (void)s; (void)mode; capturing = 1; return OK; }
Code cuStreamSynchronize(void *s) { (void)s; return OK; }
Code cuMemGetInfo_v2(size_t *f, size_t *t) {
    if (current < 0) return NO_CONTEXT;
    if (f) *f = CAPACITY - used[current];
    if (t) *t = CAPACITY;
    return OK;
}

static Code allocate(Address *address, size_t bytes) {
    if (current < 0) return NO_CONTEXT;
    if (!address || !bytes) return INVALID;
    if (bytes > CAPACITY) return OOM;
    pthread_mutex_lock(&lock);
    struct Block *b = slot(0);
    Code code = OOM;
    if (bytes > MIB) {
        if (take_pages(current, up(bytes, PAGE))) {
            *b = (struct Block){next_address, bytes, current, 1};
            next_address += up(bytes, PAGE);
            code = OK;
        }
    } else {
        size_t n = up(bytes, 512);
        struct Page *p = 0, *empty = 0;
        for (int i = 0; i < BLOCKS && !p; i++) {
            if (pages[i].blocks && pages[i].device == current && pages[i].next + n <= PAGE) p = &pages[i];
            if (!pages[i].blocks && !empty) empty = &pages[i];
        }
        if (!p && take_pages(current, PAGE)) {
            *(p = empty) = (struct Page){next_address, current, 0, 0};
            next_address += PAGE;
        }
        if (p) {
            *b = (struct Block){p->address + p->next, bytes, current, 2};
            p->next += n;
            p->blocks++;
            code = OK;
        }
    }
    if (code == OK) *address = b->address;
    pthread_mutex_unlock(&lock);
    return code;
}
Code cuMemAlloc_v2(Address *address, size_t bytes) { return allocate(address, bytes); }
Code cuMemAllocPitch_v2(Address *a, size_t *pitch, size_t w, size_t h, unsigned e) { (void)e; *pitch = up(w, 512); return allocate(a, *pitch * h); }
Code cuMemAllocManaged(Address *address, size_t bytes, unsigned flags) {
    (void)flags;
    pthread_mutex_lock(&lock);
    *slot(0) = (struct Block){*address = next_address, bytes, current, 4};
    next_address += up(bytes, PAGE);
    pthread_mutex_unlock(&lock);
    return OK;
}
Code cuMemFree_v2(Address address) {
    pthread_mutex_lock(&lock);
    struct Block *b = address ? slot(address) : 0;
    Code code = b ? OK : INVALID;
    if (b) {
        if (b->kind == 1) used[b->device] -= up(b->bytes, PAGE);
        if (b->kind == 2) for (int i = 0; i < BLOCKS; i++)
            if (pages[i].blocks && address >= pages[i].address && address < pages[i].address + PAGE && !--pages[i].blocks)
                used[b->device] -= PAGE;
        if (b->kind == 3) pools[b->device].live -= b->bytes;
        b->address = 0;
    }
    pthread_mutex_unlock(&lock);
    return code;
}

Code cuMemAllocFromPoolAsync(Address *address, size_t bytes, void *handle, void *stream) {
    (void)stream;
    pthread_mutex_lock(&lock);
    struct Pool *p = handle;
    p->device = (int)(p - pools);
    // Memory of a graph comes when the graph is run.
    if (capturing) { *address = next_address++; pthread_mutex_unlock(&lock); return OK; }
    // A pool may grow by more than it must.
    size_t wanted = up(p->live + bytes, (getenv("GROWTH") ? 512 : 32) * MIB);
    Code code = OK;
    if (wanted > p->reserved) {
        if (take_pages(p->device, wanted - p->reserved)) p->reserved = wanted;
        else code = OOM;
    }
    if (code == OK) {
        *slot(0) = (struct Block){next_address, bytes, p->device, 3};
        *address = next_address;
        next_address += up(bytes, PAGE);
        p->live += bytes;
    }
    pthread_mutex_unlock(&lock);
    return code;
}
Code cuMemAllocAsync(Address *address, size_t bytes, void *stream) {
    return current < 0 ? NO_CONTEXT : cuMemAllocFromPoolAsync(address, bytes, &pools[current], stream);
}
Code cuMemFreeAsync(Address address, void *stream) { (void)stream; return cuMemFree_v2(address); }

struct Array { size_t width, height; unsigned format, channels; };
Code cuArrayCreate_v2(Address *array, const struct Array *d) { return allocate(array, up(d->width * d->height * 4 * d->channels, PAGE)); }
Code cuArrayDestroy(Address array) { return cuMemFree_v2(array); }

Code cuMemHostAlloc(void **p, size_t bytes, unsigned flags) { (void)flags; *p = malloc(bytes); return *p ? OK : OOM; }
Code cuMemFreeHost(void *p) { free(p); return OK; }
Code cuMemHostRegister_v2(void *p, size_t bytes, unsigned flags) { (void)p; (void)bytes; (void)flags; return OK; }
Code cuMemHostUnregister(void *p) { (void)p; return OK; }

struct Properties { unsigned kind, types, location; int number; };
static void end_handle(int h) {
    struct Handle *it = &handles[h];
    if (!it->references && !it->mappings && it->bytes) {
        if (it->device >= 0) used[it->device] -= it->bytes;
        it->bytes = 0;
    }
}
Code cuMemCreate(uint64_t *handle, size_t bytes, const struct Properties *p, unsigned long long flags) {
    (void)flags;
    int h = 1;
    while (handles[h].bytes) h++;
    if (p->location == 1 && !take_pages(p->number, bytes)) return OOM;
    handles[h] = (struct Handle){bytes, p->location == 1 ? p->number : -1, 1, 0};
    *handle = h;
    return OK;
}
Code cuMemRelease(uint64_t h) { handles[h].references--; end_handle((int)h); return OK; }
Code cuMemRetainAllocationHandle(uint64_t *h, void *address) {
    for (int i = 0; i < BLOCKS; i++) if (maps[i].address == (Address)address) { handles[*h = maps[i].handle].references++; return OK; }
    return INVALID;
}
Code cuMemMap(Address address, size_t bytes, size_t offset, uint64_t h, unsigned long long flags) {
    (void)offset; (void)flags;
    int i = 0;
    while (maps[i].address) i++;
    maps[i] = (struct Map){address, bytes, (int)h};
    handles[h].mappings++;
    return OK;
}
Code cuMemUnmap(Address address, size_t bytes) {
    for (int i = 0; i < BLOCKS; i++) if (maps[i].address >= address && maps[i].address < address + bytes && maps[i].address) {
        maps[i].address = 0;
        handles[maps[i].handle].mappings--;
        end_handle(maps[i].handle);
    }
    return OK;
}

// A function that was added after the library that stands before this one was built.
Code cuAddedLater(int *n) { *n = 7; return OK; }

Code cuGetProcAddress_v2(const char *name, void **found, int version, unsigned long long flags, unsigned *how) {
    static const char *const newest[] = {"cuMemAlloc", "cuMemFree", "cuMemGetInfo", "cuDeviceTotalMem", "cuGetProcAddress"};
    (void)version; (void)flags;
    char full[64];
    snprintf(full, sizeof full, "%s", name);
    for (unsigned i = 0; i < 5; i++) if (!strcmp(name, newest[i])) snprintf(full, sizeof full, "%s_v2", name);
    Dl_info here;
    dladdr((void *)cuGetProcAddress_v2, &here);
    *found = dlsym(dlopen(here.dli_fname, RTLD_NOW), full);
    if (how) *how = *found ? 0 : 1;
    return *found ? OK : 500;
}
Code cuGetProcAddress(const char *name, void **found, int version, unsigned long long flags) { return cuGetProcAddress_v2(name, found, version, flags, 0); }
