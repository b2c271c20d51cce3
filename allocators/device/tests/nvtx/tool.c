/* A tool for NVTX's memory extension, compiled against NVIDIA's own headers. It writes each call to
 * the file that NVTX_TEST_RECORD names, and checks it:
 *
 * - structures have the size and the compatibility number of the headers;
 * - calls come one at a time, and with the domain that this tool made;
 * - heaps do not overlap each other, and regions do not either;
 * - a region lies in its heap, and a handle or a pointer is one that is known;
 * - a heap ends without regions.
 *
 * A line is "OPERATION ADDRESS BYTES NAME". A violation is a line that begins with "violation". */
#define NVTX_NO_IMPL
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <nvtx3/nvToolsExtMem.h>

struct range {
    uintptr_t start, end;
    int live;
};

static struct range *heaps, *regions;
static size_t heap_count, region_count;
static struct nvtxDomainRegistration_st *const domain =
    (struct nvtxDomainRegistration_st *)&heap_count;
static int record = -1, busy;

static void line(const char *format, ...) {
    char text[256];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (write(record, text, (size_t)length) != length) abort();
}

/* Whether a heap is refused: the address that NVTX_TEST_REFUSE gives nothing to, if it is set. */

static int refuses(void) {
    return getenv("NVTX_TEST_REFUSE") != NULL;
}

static void enter(nvtxDomainHandle_t in) {
    if (__atomic_exchange_n(&busy, 1, __ATOMIC_ACQ_REL)) line("violation: two calls at once\n");
    if (in != domain) line("violation: a foreign domain\n");
}

static void leave(void) {
    __atomic_store_n(&busy, 0, __ATOMIC_RELEASE);
}

static struct range *add(struct range **list, size_t *count, uintptr_t start, uintptr_t end) {
    struct range *free_entry = NULL;
    for (size_t i = 0; i < *count; i++) {
        struct range *other = *list + i;
        if (!other->live) free_entry = other;
        else if (other->start < end && start < other->end)
            line("violation: %#lx to %#lx overlaps %#lx to %#lx\n", start, end, other->start,
                 other->end);
    }
    if (!free_entry) {
        *list = realloc(*list, (*count + 1) * sizeof **list);
        free_entry = *list + (*count)++;
    }
    *free_entry = (struct range){start, end, 1};
    return free_entry;
}

static struct range *find(struct range *list, size_t count, uintptr_t start) {
    for (size_t i = 0; i < count; i++)
        if (list[i].live && list[i].start == start) return list + i;
    return NULL;
}

#define CHECK_STRUCTURE(desc)                                                                      \
    if ((desc)->extCompatID != NVTX_EXT_COMPATID_MEM || (desc)->structSize != sizeof *(desc))      \
    line("violation: a structure of %u bytes, version %#x\n", (desc)->structSize,                  \
         (desc)->extCompatID)

/* A handle is one more than the address, so that a program cannot take one for the other. */
static nvtxMemHeapHandle_t heap_register(nvtxDomainHandle_t in, nvtxMemHeapDesc_t const *desc) {
    enter(in);
    CHECK_STRUCTURE(desc);
    if (desc->usage != NVTX_MEM_HEAP_USAGE_TYPE_SUB_ALLOCATOR ||
        desc->type != NVTX_MEM_TYPE_VIRTUAL_ADDRESS || desc->reserved0 != 0 ||
        desc->typeSpecificDescSize != sizeof(nvtxMemVirtualRangeDesc_t) || desc->category != 0 ||
        desc->messageType != NVTX_MESSAGE_UNKNOWN || desc->message.ascii != NULL)
        line("violation: a heap of another type\n");
    nvtxMemVirtualRangeDesc_t const *range = desc->typeSpecificDesc;
    uintptr_t start = (uintptr_t)range->ptr;
    int refused = refuses();
    line("%s %#lx %zu\n", refused ? "refused" : "heap", start, range->size);
    if (!refused) add(&heaps, &heap_count, start, start + range->size);
    leave();
    return refused ? NULL : (nvtxMemHeapHandle_t)(start + 1);
}

static void heap_unregister(nvtxDomainHandle_t in, nvtxMemHeapHandle_t handle) {
    enter(in);
    uintptr_t start = (uintptr_t)handle - 1;
    struct range *heap = find(heaps, heap_count, start);
    line("heap-end %#lx 0\n", start);
    if (!heap) line("violation: no heap at %#lx\n", start);
    for (size_t i = 0; heap && i < region_count; i++)
        if (regions[i].live && regions[i].start < heap->end && heap->start < regions[i].end)
            line("violation: the heap at %#lx ends before its region %#lx\n", start,
                 regions[i].start);
    if (heap) heap->live = 0;
    leave();
}

static void regions_register(nvtxDomainHandle_t in, nvtxMemRegionsRegisterBatch_t const *desc) {
    enter(in);
    CHECK_STRUCTURE(desc);
    if (desc->regionType != NVTX_MEM_TYPE_VIRTUAL_ADDRESS || desc->regionHandleElementsOut ||
        desc->regionDescElementSize != sizeof(nvtxMemVirtualRangeDesc_t))
        line("violation: regions of another type\n");
    struct range *heap = find(heaps, heap_count, (uintptr_t)desc->heap - 1);
    nvtxMemVirtualRangeDesc_t const *ranges = desc->regionDescElements;
    for (size_t i = 0; i < desc->regionCount; i++) {
        uintptr_t start = (uintptr_t)ranges[i].ptr, end = start + ranges[i].size;
        line("region %#lx %zu\n", start, ranges[i].size);
        if (!heap || start < heap->start || end > heap->end || start >= end)
            line("violation: %#lx to %#lx is not inside its heap\n", start, end);
        add(&regions, &region_count, start, end);
    }
    leave();
}

static void regions_unregister(nvtxDomainHandle_t in, nvtxMemRegionsUnregisterBatch_t const *desc) {
    enter(in);
    CHECK_STRUCTURE(desc);
    if (desc->refType != NVTX_MEM_REGION_REF_TYPE_POINTER ||
        desc->refElementSize != sizeof(nvtxMemRegionRef_t))
        line("violation: references of another type\n");
    for (size_t i = 0; i < desc->refCount; i++) {
        uintptr_t start = (uintptr_t)desc->refElements[i].pointer;
        struct range *region = find(regions, region_count, start);
        line("region-end %#lx 0\n", start);
        if (region) region->live = 0;
        else line("violation: no region at %#lx\n", start);
    }
    leave();
}

static void regions_name(nvtxDomainHandle_t in, nvtxMemRegionsNameBatch_t const *desc) {
    enter(in);
    CHECK_STRUCTURE(desc);
    for (size_t i = 0; i < desc->regionCount; i++) {
        nvtxMemRegionNameDesc_t const *element = desc->regionElements + i;
        if (desc->regionElementSize != sizeof *element || desc->reserved0 || desc->reserved1 ||
            element->regionRefType != NVTX_MEM_REGION_REF_TYPE_POINTER ||
            element->nameType != NVTX_MESSAGE_TYPE_ASCII || element->reserved0)
            line("violation: a name of another type\n");
        uintptr_t start = (uintptr_t)element->region.pointer;
        line("name %#lx 0 %s\n", start, element->name.ascii);
        size_t length = strlen(element->name.ascii);
        if (!find(regions, region_count, start)) line("violation: no region at %#lx\n", start);
        if (length < 1 || length > 49) line("violation: a name of %zu characters\n", length);
    }
    leave();
}

static nvtxDomainHandle_t domain_create(char const *name) {
    line("domain 0 0 %s\n", name);
    return domain;
}

/* Writes a function to the table of the core's second part, as tools do. */
int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get_export_table) {
    char const *path = getenv("NVTX_TEST_RECORD");
    if (!path) return 0;
    record = open(path, O_WRONLY | O_CREAT | O_APPEND, 0600);
    if (record < 0) return 0;
    NvtxExportTableVersionInfo const *version = get_export_table(NVTX_ETID_VERSIONINFO);
    if (version->struct_size != sizeof *version || version->version != NVTX_VERSION)
        line("violation: version %u\n", version->version);
    version->SetInjectionNvtxVersion(NVTX_VERSION);
    if (get_export_table(NVTX_ETID_INVALID) || get_export_table(NVTX_ETID_SIZE))
        line("violation: a table without a number\n");
    NvtxExportTableCallbacks const *callbacks = get_export_table(NVTX_ETID_CALLBACKS);
    if (callbacks->struct_size != sizeof *callbacks) line("violation: a table of callbacks\n");
    static unsigned const sizes[] = {0, NVTX_CBID_CORE_SIZE, NVTX_CBID_CUDA_SIZE,
                                     NVTX_CBID_OPENCL_SIZE, NVTX_CBID_CUDART_SIZE,
                                     NVTX_CBID_CORE2_SIZE, NVTX_CBID_SYNC_SIZE};
    for (int module = 0; module <= NVTX_CB_MODULE_SIZE; module++) {
        NvtxFunctionTable table = NULL;
        unsigned size = 0;
        int known = callbacks->GetModuleFunctionTable(module, &table, &size);
        if (known != (module > 0 && module < NVTX_CB_MODULE_SIZE))
            line("violation: module %d is known: %d\n", module, known);
        if (!known) continue;
        if (size != sizes[module] || table[0] || table[size])
            line("violation: %u slots in module %d\n", size, module);
        for (unsigned slot = 1; slot < size; slot++)
            if (!table[slot]) line("violation: no slot %u in module %d\n", slot, module);
    }
    NvtxFunctionTable core2 = NULL;
    unsigned size = 0;
    callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &core2, &size);
    *core2[NVTX_CBID_CORE2_DomainCreateA] = (NvtxFunctionPointer)domain_create;
    line("start 0 0\n");
    return 1;
}

int InitializeInjectionNvtxExtension(nvtxExtModuleInfo_t *info) {
    if (info->nvtxVer != NVTX_VERSION || info->structSize != sizeof *info ||
        info->moduleId != NVTX_EXT_MODULEID_MEM || info->compatId != NVTX_EXT_COMPATID_MEM ||
        info->segmentsCount != 1 || info->segments[0].segmentId != 1 ||
        info->segments[0].slotCount != 63 || info->getExportFunction || info->extInfo)
        line("violation: another module\n");
    intptr_t *slots = info->segments[0].functionSlots;
    for (size_t slot = 0; slot < info->segments[0].slotCount; slot++)
        if (slots[slot]) line("violation: slot %zu is taken\n", slot);
    slots[NVTX3EXT_CBID_nvtxMemHeapRegister] = (intptr_t)heap_register;
    slots[NVTX3EXT_CBID_nvtxMemHeapUnregister] = (intptr_t)heap_unregister;
    slots[NVTX3EXT_CBID_nvtxMemRegionsRegister] = (intptr_t)regions_register;
    slots[NVTX3EXT_CBID_nvtxMemRegionsUnregister] = (intptr_t)regions_unregister;
    slots[NVTX3EXT_CBID_nvtxMemRegionsName] = (intptr_t)regions_name;
    line("extension 0 0\n");
    return 1;
}
