/* The part of libnrt.c that not every runtime has: exports, batches, and what is known of the machine. */

/* A descriptor of its own for each export, as the driver makes one: not a duplicate, so that it has a file position,
 * which remembers whether a card is attached (fake_attach). */
static NRT_STATUS exported(struct storage *storage, int *fd) {
    const char *choice = getenv("FAKE_NRT_DMABUF");
    char path[64] = "/proc/self/fd/";
    if (choice != NULL && strcmp(choice, "invalid") == 0)
        return NRT_INVALID;
    if (choice != NULL && strcmp(choice, "resource") == 0)
        return NRT_RESOURCE;
    snprintf(path + strlen(path), sizeof path - strlen(path), "%d", storage->fd);
    *fd = open(path, O_RDWR | O_CLOEXEC);
    return *fd >= 0 ? NRT_SUCCESS : NRT_RESOURCE;
}

EXPORT NRT_STATUS nrt_get_dmabuf_fd(uint64_t va, uint64_t size, int *fd) {
    NRT_STATUS status = gate();
    if (status != NRT_SUCCESS)
        return status;
    struct storage *storage = mapped_at(va, size);
    /* Our descriptors show a whole tensor, and this function can't say where in it the memory begins. */
    if (storage == NULL || fd == NULL || va != (uint64_t)(uintptr_t)storage->address)
        return NRT_INVALID;
    return exported(storage, fd);
}

#ifdef DMABUF_V2
EXPORT NRT_STATUS nrt_get_dmabuf_fd_v2(uint64_t va, uint64_t size, int *fd, uint64_t *offset);
EXPORT NRT_STATUS nrt_get_dmabuf_fd_v2(uint64_t va, uint64_t size, int *fd, uint64_t *offset) {
    NRT_STATUS status = gate();
    if (status != NRT_SUCCESS)
        return status;
    struct storage *storage = mapped_at(va, size);
    if (storage == NULL || fd == NULL || offset == NULL)
        return NRT_INVALID;
    *offset = va - (uint64_t)(uintptr_t)storage->address;
    return exported(storage, fd);
}
#endif

static int batch_calls, batches_seen;

#ifndef OLD
static NRT_STATUS move_all(const nrt_tensor_batch_t *batches, uint64_t num_batches, bool writes) {
    NRT_STATUS status = batches == NULL && num_batches > 0 ? NRT_INVALID : gate();
    for (uint64_t batch = 0; batch < num_batches && status == NRT_SUCCESS; batch++) {
        for (uint32_t index = 0; index < batches[batch].num_ops && status == NRT_SUCCESS; index++) {
            const nrt_tensor_batch_op_t *each = &batches[batch].ops[index];
            status = move(batches[batch].tensor, each->buffer, each->offset, each->size, writes);
        }
    }
    return status;
}

EXPORT NRT_STATUS nrt_tensor_read_batch(const nrt_tensor_batch_t *batches, uint64_t num_batches, bool unsafe) {
    (void)unsafe;
    batch_calls++;
    batches_seen += (int)num_batches;
    return move_all(batches, num_batches, false);
}

EXPORT NRT_STATUS nrt_tensor_write_batch(const nrt_tensor_batch_t *batches, uint64_t num_batches, bool unsafe) {
    (void)unsafe;
    batch_calls++;
    batches_seen += (int)num_batches;
    return move_all(batches, num_batches, true);
}

EXPORT NRT_STATUS nrt_memcpy_to_device(void *dest, const void *src, size_t size) {
    NRT_STATUS status = gate();
    if (status != NRT_SUCCESS)
        return status;
    if (mapped_at((uint64_t)(uintptr_t)dest, size) == NULL)
        return NRT_INVALID;
    memcpy(dest, src, size);
    return NRT_SUCCESS;
}

EXPORT NRT_STATUS nrt_get_attached_efa_bdf(const void *va, char *efa_bdf, size_t *len) {
    const char *bdf = getenv("FAKE_NRT_BDF");
    NRT_STATUS status = gate();
    if (status != NRT_SUCCESS)
        return status;
    if (bdf == NULL || mapped_at((uint64_t)(uintptr_t)va, 1) == NULL)
        return NRT_FAILURE;
    if (strlen(bdf) + 1 > *len)
        return NRT_RESOURCE;
    *len = strlen(bdf);
    memcpy(efa_bdf, bdf, *len + 1);
    return NRT_SUCCESS;
}

EXPORT NRT_STATUS nrt_host_device_id_get(int neuron_dev, uint32_t *host_device_id) {
    if (neuron_dev < 0)
        return NRT_INVALID;
    *host_device_id = (uint32_t)neuron_dev + (uint32_t)number("FAKE_NRT_FIRST_DEVICE", 0);
    return NRT_SUCCESS;
}

EXPORT NRT_STATUS nrt_get_vnc_memory_stats(
    uint32_t vnc, nrt_vnc_memory_stats_t *stats, size_t stats_size_in, size_t *stats_size_out) {
    NRT_STATUS status = gate();
    if (status != NRT_SUCCESS)
        return status;
    if (vnc >= visible || stats_size_in < sizeof *stats)
        return NRT_INVALID;
    *stats = (nrt_vnc_memory_stats_t){used[vnc], (size_t)number("FAKE_NRT_HBM", (uint64_t)1 << 30)};
    *stats_size_out = sizeof *stats;
    return NRT_SUCCESS;
}

EXPORT NRT_STATUS nrt_get_instance_info(nrt_instance_info_t *info, size_t instance_info_len) {
    if (info == NULL || instance_info_len < sizeof *info)
        return NRT_INVALID;
    *info = (nrt_instance_info_t){.family = (uint32_t)number("FAKE_NRT_FAMILY", NRT_INSTANCE_TRN2), .arch_name = "NCv3"};
    return NRT_SUCCESS;
}

EXPORT NRT_STATUS nrt_get_version(nrt_version_t *ver, size_t size) {
    if (ver == NULL || size < sizeof *ver)
        return NRT_INVALID;
    *ver = (nrt_version_t){.rt_major = 2, .rt_minor = 34, .rt_patch = 10, .rt_detail = "stand-in"};
    return NRT_SUCCESS;
}
#endif

/* For tests only. */

/* A card attaches to a descriptor that nrt_get_dmabuf_fd gave: 0, or EBUSY if one has, as the driver allows one. */
EXPORT int fake_attach(int fd);
EXPORT int fake_attach(int fd) {
    if (lseek(fd, 0, SEEK_CUR) != 0)
        return errno == EBADF ? EBADF : EBUSY;
    return lseek(fd, 1, SEEK_SET) == 1 ? 0 : EBADF;
}

EXPORT int fake_init_calls(void);
EXPORT int fake_init_calls(void) {
    return init_calls;
}

EXPORT int fake_batch_calls(void);
EXPORT int fake_batch_calls(void) {
    return batch_calls;
}

EXPORT int fake_batches(void);
EXPORT int fake_batches(void) {
    return batches_seen;
}

EXPORT int fake_tensors(void);
EXPORT int fake_tensors(void) { /* How many allocations are alive. */
    int count = 0;
    for (struct storage *each = storages; each != NULL; each = each->next)
        count++;
    return count;
}
