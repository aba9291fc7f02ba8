/* What a card has: completion queues, and memory that it may touch. */

#include "fake.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

region *regions[NUMBERS];
static uint64_t next_region = 1;
static dev_t used_devices[4096];
static ino_t used_files[4096];
static unsigned used_count;

void push(queue *cq, void *context, uint64_t flags, uint64_t data, int error)
{
    if (cq->count == QUEUE)
        abort(); /* overrun: a card would be in error for good */
    /* Anywhere among what nobody has looked at yet. */
    unsigned place = cq->count ? (unsigned)rand() % (cq->count + 1) : 0;
    memmove(&cq->entries[place + 1], &cq->entries[place], (cq->count - place) * sizeof(entry));
    cq->entries[place] = (entry){context, flags, data, error};
    cq->count++;
}

static ssize_t cq_read(struct fid_cq *fid, void *room, size_t count)
{
    queue *cq = (queue *)fid;
    struct fi_cq_data_entry *out = room;
    ssize_t stored = 0;

    pthread_mutex_lock(&lock);
    while ((size_t)stored < count && cq->count && !cq->entries[0].error) {
        const entry *first = &cq->entries[0];
        out[stored++] = (struct fi_cq_data_entry){first->context, first->flags, 0, NULL, first->data};
        memmove(cq->entries, cq->entries + 1, --cq->count * sizeof(entry));
    }
    if (!stored)
        stored = cq->count ? -FI_EAVAIL : -FI_EAGAIN;
    pthread_mutex_unlock(&lock);
    return stored;
}

static ssize_t cq_readerr(struct fid_cq *fid, void *room, uint64_t flags)
{
    queue *cq = (queue *)fid;
    struct fi_cq_err_entry *out = room;
    ssize_t stored = -FI_EAGAIN;

    (void)flags;
    pthread_mutex_lock(&lock);
    if (cq->count && cq->entries[0].error) {
        memset(out, 0, sizeof *out);
        out->op_context = cq->entries[0].context;
        out->flags = cq->entries[0].flags;
        out->err = cq->entries[0].error;
        memmove(cq->entries, cq->entries + 1, --cq->count * sizeof(entry));
        stored = 1;
    }
    pthread_mutex_unlock(&lock);
    return stored;
}

static const char *cq_strerror(struct fid_cq *fid, int error, const void *data, char *text, size_t size)
{
    (void)fid, (void)error, (void)data, (void)text, (void)size;
    return "as the stand-in says";
}

static struct fi_ops_cq queue_ops = {
    .size = sizeof queue_ops, .read = cq_read, .readerr = cq_readerr, .strerror = cq_strerror};

int cq_open(struct fid_domain *fid, void *attr, struct fid_cq **out, void *context)
{
    (void)fid, (void)context;
    if (((struct fi_cq_attr *)attr)->wait_obj != FI_WAIT_NONE)
        return -FI_ENOSYS;
    queue *cq = calloc(1, sizeof *cq);
    cq->fid.fid.ops = &plain_ops;
    cq->fid.ops = &queue_ops;
    *out = &cq->fid;
    return 0;
}

static int close_region(struct fid *fid)
{
    region *mr = (region *)fid;

    pthread_mutex_lock(&lock);
    regions[mr->fid.key] = NULL;
    pthread_mutex_unlock(&lock);
    say("close %#lx\n", mr->start);
    free(mr);
    return 0;
}

static struct fi_ops region_ops = {.size = sizeof region_ops, .close = close_region};

/* A driver can attach a dmabuf once; each export is a new one, as each memfd is a new file here. */
static int attach(const struct fi_mr_dmabuf *given)
{
    struct stat state;

    if (fstat(given->fd, &state))
        return -9;
    for (unsigned i = 0; i < used_count; i++)
        if (used_files[i] == state.st_ino && used_devices[i] == state.st_dev)
            return -16;
    used_devices[used_count] = state.st_dev;
    used_files[used_count++] = state.st_ino;
    return 0;
}

static int regattr(struct fid *fid, const void *room, uint64_t flags, struct fid_mr **out)
{
    const struct fi_mr_attr *attr = room;
    domain *of = (domain *)fid;
    struct iovec range;
    int error = 0;

    if (flags & FI_MR_DMABUF) {
        const struct fi_mr_dmabuf *given = attr->dmabuf;
        range = (struct iovec){(char *)given->base_addr + given->offset, given->len};
        say("regattr %s iface=%d device=%d at=%p length=%zu fd=%s offset=%lu access=%lx\n", of->card, attr->iface,
            attr->device.cuda, range.iov_base, range.iov_len, fcntl(given->fd, F_GETFD) >= 0 ? "open" : "shut",
            given->offset, attr->access);
    } else {
        range = *attr->mr_iov;
        say("regattr %s iface=%d device=%d at=%p length=%zu access=%lx\n", of->card, attr->iface, attr->device.cuda,
            range.iov_base, range.iov_len, attr->access);
    }
    if (attr->iface != FI_HMEM_SYSTEM && (attr->iface != device() || refuses("regattr")))
        error = -FI_ENOSYS;
    else if (attr->iface != FI_HMEM_SYSTEM && !of->hmem)
        error = -FI_EINVAL; /* efa takes it for host memory then, and fails when it is used */
    else if (range.iov_len > strtoull(setting("FAKE_MOST", "-1"), NULL, 10))
        error = -FI_EINVAL;
    else if (flags & FI_MR_DMABUF)
        error = refuses("dmabuf") ? -95 : attach(attr->dmabuf);
    if (error)
        return error;
    region *mr = calloc(1, sizeof *mr);
    mr->fid.fid.ops = &region_ops;
    mr->fid.mem_desc = mr;
    mr->of = of;
    mr->start = (uintptr_t)range.iov_base;
    mr->length = range.iov_len;
    mr->access = attr->access;
    mr->iface = attr->iface;
    pthread_mutex_lock(&lock);
    mr->fid.key = next_region++;
    regions[mr->fid.key] = mr;
    pthread_mutex_unlock(&lock);
    *out = &mr->fid;
    return 0;
}

struct fi_ops_mr memory_ops = {.size = sizeof memory_ops, .regattr = regattr};
