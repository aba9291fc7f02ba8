/* The stand-in's streams and events: a part of libcuda.c. */

static struct CUstream_st *stream_of(CUstream handle) {
    return handle == NULL || (uintptr_t)handle == 1 ? &default_stream : handle;
}

static void perform(const struct task *task) {
    switch (task->action) {
    case WORK:
        break;
    case WRITE:
        __atomic_store_n((uint32_t *)task->to, task->value, __ATOMIC_RELEASE);
        break;
    case COPY:
        memcpy(task->to, task->from, task->size);
        break;
    case CLEAR:
        memset(task->to, (int)task->value, task->size);
        break;
    case RECORD:
        task->event->reached = task->value;
        break;
    }
}

/* Everything up to the first work that has not finished. With the lock. */
static void advance(struct CUstream_st *stream) {
    struct task *task;
    while ((task = stream->first) != NULL && (task->action != WORK || task->finished || unblocked)) {
        perform(task);
        stream->first = task->next;
        if (stream->first == NULL)
            stream->last = &stream->first;
        free(task);
    }
    pthread_cond_broadcast(&changed);
}

static CUresult enqueue(CUstream handle, struct task content) {
    struct CUstream_st *stream = stream_of(handle);
    struct task *task = malloc(sizeof *task);
    if (task == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *task = content;
    pthread_mutex_lock(&lock);
    *stream->last = task;
    stream->last = &task->next;
    advance(stream);
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

static bool within(CUdeviceptr address, size_t size, bool host_too) {
    struct range *range = find_piece((void *)(uintptr_t)address);
    return range != NULL && (host_too || range->kind != HOST) &&
           (uintptr_t)address - (uintptr_t)range->address + size <= range->mapped;
}

EXPORT CUresult cuStreamCreate(CUstream *phStream, unsigned int Flags) {
    GATE(context_gate());
    if ((Flags & ~(unsigned int)CU_STREAM_NON_BLOCKING) != 0)
        return CUDA_ERROR_INVALID_VALUE;
    CUstream stream = calloc(1, sizeof *stream);
    if (stream == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    stream->last = &stream->first;
    pthread_mutex_lock(&lock);
    stream->next = default_stream.next;
    default_stream.next = stream;
    streams++;
    pthread_mutex_unlock(&lock);
    *phStream = stream;
    return CUDA_SUCCESS;
}

static void drain(struct CUstream_st *stream) {
    waiting++;
    while (stream->first != NULL)
        pthread_cond_wait(&changed, &lock);
    waiting--;
}

EXPORT CUresult cuStreamDestroy_v2(CUstream hStream) {
    GATE(context_gate());
    if (hStream == NULL)
        return CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_lock(&lock);
    drain(hStream);
    struct CUstream_st *before = &default_stream;
    while (before->next != hStream)
        before = before->next;
    before->next = hStream->next;
    streams--;
    pthread_mutex_unlock(&lock);
    free(hStream);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamSynchronize(CUstream hStream) {
    GATE(context_gate());
    pthread_mutex_lock(&lock);
    drain(stream_of(hStream));
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSynchronize(void) {
    GATE(context_gate());
    pthread_mutex_lock(&lock);
    synchronised++;
    for (struct CUstream_st *stream = &default_stream; stream != NULL;)
        if (stream->first != NULL) {
            pthread_cond_wait(&changed, &lock);
            stream = &default_stream; /* Meanwhile there may be others. */
        } else {
            stream = stream->next;
        }
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

static CUresult write_value(CUstream stream, CUdeviceptr addr, uint32_t value) {
    GATE(context_gate());
    if (fail_marks)
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (writes == 0)
        return CUDA_ERROR_NOT_SUPPORTED;
    if (addr % 4 != 0 || !within(addr, 4, true))
        return CUDA_ERROR_INVALID_VALUE;
    if (writes < 0)
        return CUDA_SUCCESS;
    return enqueue(stream, (struct task){.action = WRITE, .to = (void *)(uintptr_t)addr, .value = value});
}

#ifndef PUBLIC_HEADERS
EXPORT CUresult cuStreamWriteValue32(CUstream stream, CUdeviceptr addr, uint32_t value, unsigned int flags) {
    return flags == CU_STREAM_WRITE_VALUE_DEFAULT ? write_value(stream, addr, value) : CUDA_ERROR_INVALID_VALUE;
}
#endif

#if !defined(OLD) && !defined(V1)
EXPORT CUresult cuStreamWriteValue32_v2(CUstream stream, CUdeviceptr addr, uint32_t value, unsigned int flags) {
    return flags == CU_STREAM_WRITE_VALUE_DEFAULT ? write_value(stream, addr, value) : CUDA_ERROR_INVALID_VALUE;
}
#endif

EXPORT CUresult cuMemcpyDtoHAsync_v2(void *dstHost, CUdeviceptr srcDevice, size_t ByteCount, CUstream hStream) {
    GATE(context_gate());
    if (dstHost == NULL || !within(srcDevice, ByteCount, false))
        return CUDA_ERROR_INVALID_VALUE;
    const void *from = (const void *)(uintptr_t)srcDevice;
    return enqueue(hStream, (struct task){.action = COPY, .to = dstHost, .from = from, .size = ByteCount});
}

EXPORT CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr dstDevice, const void *srcHost, size_t ByteCount, CUstream hStream) {
    GATE(context_gate());
    if (srcHost == NULL || !within(dstDevice, ByteCount, false))
        return CUDA_ERROR_INVALID_VALUE;
    void *to = (void *)(uintptr_t)dstDevice;
    return enqueue(hStream, (struct task){.action = COPY, .to = to, .from = srcHost, .size = ByteCount});
}

EXPORT CUresult cuMemsetD8Async(CUdeviceptr dstDevice, unsigned char uc, size_t N, CUstream hStream) {
    GATE(context_gate());
    if (!within(dstDevice, N, false))
        return CUDA_ERROR_INVALID_VALUE;
    void *to = (void *)(uintptr_t)dstDevice;
    return enqueue(hStream, (struct task){.action = CLEAR, .to = to, .value = uc, .size = N});
}

EXPORT CUresult cuEventCreate(CUevent *phEvent, unsigned int Flags) {
    GATE(context_gate());
    if (Flags != (CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING))
        return CUDA_ERROR_INVALID_VALUE;
    *phEvent = calloc(1, sizeof **phEvent);
    if (*phEvent == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    events++;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuEventRecord(CUevent hEvent, CUstream hStream) {
    GATE(context_gate());
    if (fail_marks)
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    return enqueue(hStream, (struct task){.action = RECORD, .event = hEvent, .value = ++hEvent->recorded});
}

EXPORT CUresult cuEventSynchronize(CUevent hEvent) {
    GATE(context_gate());
    pthread_mutex_lock(&lock);
    while (hEvent->reached != hEvent->recorded)
        pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuEventDestroy_v2(CUevent hEvent) {
    GATE(context_gate());
    free(hEvent);
    events--;
    return CUDA_SUCCESS;
}

/* For tests. */

/* Work on that stream that lasts until the test says otherwise. */
EXPORT CUresult fake_launch(CUstream stream) {
    return enqueue(stream, (struct task){.action = WORK});
}

/* The oldest unfinished work on that stream has finished. */
EXPORT void fake_finish(CUstream handle) {
    struct CUstream_st *stream = stream_of(handle);
    pthread_mutex_lock(&lock);
    if (stream->first != NULL)
        stream->first->finished = true;
    advance(stream);
    pthread_mutex_unlock(&lock);
}

/* All work has finished, and lasts no longer from now on: so that a test which has failed can end. */
EXPORT void fake_finish_all(void) {
    pthread_mutex_lock(&lock);
    unblocked = true;
    for (struct CUstream_st *stream = &default_stream; stream != NULL; stream = stream->next)
        advance(stream);
    pthread_mutex_unlock(&lock);
}

EXPORT void fake_fail_marks(int fail) {
    fail_marks = fail != 0;
}

/* How many of everything there are: allocations, streams, events, handles, references to contexts, and how deep this
 * thread's stack of contexts is. */
EXPORT void fake_counts(int counts[6]) {
    memset(counts, 0, 6 * sizeof *counts);
    for (const struct range *range = ranges; range != NULL; range = range->next)
        counts[0] += range->kind == DEVICE || range->kind == HOST;
    counts[1] = streams;
    counts[2] = events;
    counts[3] = handles;
    for (int device = 0; device < MOST_DEVICES; device++)
        counts[4] += contexts[device].retained;
    counts[5] = depth;
}

/* How many threads wait for all of a stream's work. */
EXPORT int fake_waiting(void) {
    pthread_mutex_lock(&lock);
    int now = waiting;
    pthread_mutex_unlock(&lock);
    return now;
}

/* How often somebody has waited for all of a device's work, or does now. */
EXPORT int fake_synchronised(void) {
    pthread_mutex_lock(&lock);
    int now = synchronised;
    pthread_mutex_unlock(&lock);
    return now;
}
