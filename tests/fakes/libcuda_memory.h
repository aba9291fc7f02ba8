/* The stand-in's memory: a part of libcuda.c. */

static struct range *find(const void *address) {
    for (struct range *range = ranges; range != NULL; range = range->next)
        if ((uintptr_t)address - (uintptr_t)range->address < range->size)
            return range;
    return NULL;
}

static struct range *find_piece(const void *address) {
    struct range *range = find(address);
    return range != NULL && (uintptr_t)address - (uintptr_t)range->address < range->mapped ? range : NULL;
}

static struct range *new_range(enum kind kind, size_t size, size_t mapped, size_t piece, size_t off) {
    struct range *range = calloc(1, sizeof *range);
    size_t room = size + 2 * LARGE;
    if (range == NULL)
        return NULL;
    range->fd = memfd_create("cuda", MFD_CLOEXEC);
    range->place = mmap(NULL, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (range->fd < 0 || range->place == MAP_FAILED || ftruncate(range->fd, (off_t)size) != 0)
        abort();
    range->address = (unsigned char *)(((uintptr_t)range->place + LARGE - 1) / LARGE * LARGE + off);
    if (mmap(range->address, mapped, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, range->fd, 0) == MAP_FAILED)
        abort();
    range->kind = kind;
    range->device = depth > 0 ? stack[depth - 1]->device : 0;
    range->rdma = true;
    range->room = room;
    range->size = size;
    range->mapped = mapped;
    range->piece = piece;
    /* What was here before is still here: nobody promises zeroes. */
    memset(range->address, 0xA5, mapped < LARGE ? mapped : LARGE);
    pthread_mutex_lock(&lock);
    range->next = ranges;
    ranges = range;
    pthread_mutex_unlock(&lock);
    return range;
}

static CUresult remove_range(const void *address, enum kind kind) {
    pthread_mutex_lock(&lock);
    struct range **place = &ranges;
    while (*place != NULL && (*place)->address != address)
        place = &(*place)->next;
    struct range *range = *place;
    if (range == NULL || range->kind != kind) {
        pthread_mutex_unlock(&lock);
        return CUDA_ERROR_INVALID_VALUE;
    }
    *place = range->next;
    if (kind == DEVICE)
        used -= range->size;
    pthread_mutex_unlock(&lock);
    munmap(range->place, range->room);
    close(range->fd);
    free(range);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *dptr, size_t bytesize) {
    GATE(context_gate());
    if (bytesize == 0)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    bool room = bytesize <= (size_t)memory - used;
    used += room ? bytesize : 0;
    pthread_mutex_unlock(&lock);
    if (!room)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *dptr = (uintptr_t)new_range(DEVICE, bytesize, bytesize, 0, (size_t)skew)->address;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemFree_v2(CUdeviceptr dptr) {
    GATE(context_gate());
    return remove_range((void *)(uintptr_t)dptr, DEVICE);
}

EXPORT CUresult cuMemHostAlloc(void **pp, size_t bytesize, unsigned int Flags) {
    GATE(context_gate());
    if ((Flags & CU_MEMHOSTALLOC_DEVICEMAP) == 0 || bytesize == 0)
        return CUDA_ERROR_INVALID_VALUE;
    *pp = new_range(HOST, bytesize, bytesize, 0, 0)->address;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *pdptr, void *p, unsigned int Flags) {
    GATE(context_gate());
    struct range *range = find(p);
    if (range == NULL || range->kind != HOST || Flags != 0)
        return CUDA_ERROR_INVALID_VALUE;
    *pdptr = (uintptr_t)p;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemFreeHost(void *p) {
    GATE(context_gate());
    return remove_range(p, HOST);
}

EXPORT CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr ptr) {
    GATE(gate());
    struct range *range = find((void *)(uintptr_t)ptr);
    if (range == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    switch ((int)attribute) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *(unsigned int *)data = range->kind == HOST ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
        *(unsigned int *)data = range->kind == MANAGED;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        *(int *)data = range->device;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
        *(size_t *)data = range->size;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE:
        *(int *)data = range->rdma;
        return CUDA_SUCCESS;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

EXPORT CUresult cuPointerSetAttribute(const void *value, CUpointer_attribute attribute, CUdeviceptr ptr) {
    GATE(context_gate());
    struct range *range = find((void *)(uintptr_t)ptr);
    if (range == NULL || attribute != CU_POINTER_ATTRIBUTE_SYNC_MEMOPS)
        return CUDA_ERROR_INVALID_VALUE;
    if (range->kind == VIRTUAL)
        return CUDA_ERROR_NOT_SUPPORTED;
    range->synchronous = *(const unsigned int *)value != 0;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemGetAddressRange_v2(CUdeviceptr *pbase, size_t *psize, CUdeviceptr dptr) {
    GATE(context_gate());
    struct range *range = find_piece((void *)(uintptr_t)dptr);
    if (range == NULL)
        return CUDA_ERROR_NOT_FOUND;
    size_t piece = range->piece != 0 ? range->piece : range->size;
    size_t before = ((uintptr_t)dptr - (uintptr_t)range->address) / piece * piece;
    *pbase = (uintptr_t)range->address + before;
    *psize = piece;
    return CUDA_SUCCESS;
}

#ifndef OLD
EXPORT CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *addr) {
    GATE(gate());
    struct range *range = find_piece(addr);
    if (range == NULL || range->kind != VIRTUAL)
        return CUDA_ERROR_INVALID_VALUE;
    handles++;
    *handle = (uintptr_t)range;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    GATE(gate());
    if (handle == 0 || handles == 0)
        return CUDA_ERROR_INVALID_VALUE;
    handles--;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemGetHandleForAddressRange(
    void *handle, CUdeviceptr dptr, size_t size, CUmemRangeHandleType handleType, unsigned long long flags) {
    GATE(context_gate());
    struct range *range = find_piece((void *)(uintptr_t)dptr);
    if (!dmabuf)
        return CUDA_ERROR_NOT_SUPPORTED;
    if (flags != 0 && !pcie)
        return CUDA_ERROR_INVALID_VALUE;
    if (range == NULL || handleType != CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD || dptr % PAGE != 0 || size % PAGE != 0)
        return CUDA_ERROR_INVALID_VALUE;
    size_t before = (uintptr_t)dptr - (uintptr_t)range->address;
    if (size == 0 || before + size > (range->mapped + PAGE - 1) / PAGE * PAGE)
        return CUDA_ERROR_INVALID_VALUE;
    int fd = dup(range->fd);
    if (fd < 0 || fd >= MOST_FDS)
        return CUDA_ERROR_OPERATING_SYSTEM;
    exports[fd].before = before;
    exports[fd].size = size;
    *(int *)handle = fd;
    return CUDA_SUCCESS;
}
#endif

/* For tests. */

/* Where in the file behind ``fd`` the exported range begins: a real dmabuf would have nothing else. */
EXPORT size_t fake_exported(int fd, size_t *size) {
    *size = exports[fd].size;
    return exports[fd].before;
}

/* Memory as torch's expandable segments have it: ``size`` bytes reserved, ``mapped`` of them in pieces. */
EXPORT void *fake_map(size_t size, size_t mapped, size_t piece, int capable) {
    struct range *range = new_range(VIRTUAL, size, mapped, piece, 0);
    range->rdma = capable != 0;
    return range->address;
}

EXPORT void *fake_managed(size_t size) {
    return new_range(MANAGED, size, size, 0, 0)->address;
}

EXPORT int fake_synchronous(void *address) {
    return find(address)->synchronous;
}
