/* Endpoints: their options, their tables of peers, and what they move. */

#include "fake.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    char card[64];
    void *to;
    void *bytes;
    size_t length;
} unseen;

static endpoint *endpoints[NUMBERS];
static uint64_t next_endpoint = 1;
static unseen late[4096];
static unsigned late_count;

static bool covers(const region *mr, const domain *of, uintptr_t start, size_t length)
{
    return mr && mr->of == of && start >= mr->start && start - mr->start + length <= mr->length;
}

static bool knows(const table *av, uint64_t number)
{
    for (unsigned i = 0; i < av->count; i++)
        if (av->known[i] == number)
            return true;
    return false;
}

/* The device sees all that this card has written to it. */
/* Like a card's access to memory, which no sanitizer sees, and which may meet the processor's (a door's bytes do). */
static void move(void *to, const void *from, size_t length)
{
    volatile unsigned char *target = to;
    const volatile unsigned char *source = from;

    for (size_t i = 0; i < length; i++)
        target[i] = source[i];
}

static void catch_up(const char *card)
{
    unsigned kept = 0;

    for (unsigned i = 0; i < late_count; i++) {
        if (strcmp(late[i].card, card) == 0) {
            move(late[i].to, late[i].bytes, late[i].length);
            free(late[i].bytes);
        } else {
            late[kept++] = late[i];
        }
    }
    late_count = kept;
}

static void deliver(const region *mr, uint64_t to, const void *from, size_t length)
{
    if (mr->iface == FI_HMEM_SYSTEM || !getenv("FAKE_LAZY")) {
        move((void *)to, from, length);
        return;
    }
    unseen *one = &late[late_count++];
    snprintf(one->card, sizeof one->card, "%s", mr->of->card);
    one->to = (void *)to;
    one->bytes = malloc(length);
    move(one->bytes, from, length);
    one->length = length;
}

static ssize_t transfer(struct fid_ep *fid, void *local, size_t length, void *desc, const uint64_t *data,
                        fi_addr_t peer, uint64_t address, uint64_t key, void *context, bool write)
{
    endpoint *from = (endpoint *)fid;
    uint64_t kind = FI_RMA | (write ? FI_WRITE : FI_READ);
    int error = 0;

    pthread_mutex_lock(&lock);
    if (!from->enabled || !covers(desc, from->of, (uintptr_t)local, length) || length > LONGEST || !context) {
        pthread_mutex_unlock(&lock);
        return -FI_EINVAL;
    }
    if (from->of->direct)
        memset(context, 0xa5, 64);
    endpoint *to = peer < from->av->count ? endpoints[from->av->known[peer]] : NULL;
    region *mr = key < sizeof regions / sizeof *regions ? regions[key] : NULL;
    if (!to || !to->enabled || (from->of->direct && !knows(to->av, from->number)))
        error = 113;
    else if (!covers(mr, to->of, address, length) || !(mr->access & (write ? FI_REMOTE_WRITE : FI_REMOTE_READ)))
        error = 5;
    else if (write)
        deliver(mr, address, local, length);
    else {
        catch_up(mr->of->card);
        move(local, (void *)address, length);
    }
    push(from->cq, context, kind, 0, error);
    if (!error && data)
        push(to->cq, NULL, FI_REMOTE_CQ_DATA | FI_RMA | FI_REMOTE_WRITE, *data & 0xffffffff, 0);
    pthread_mutex_unlock(&lock);
    return 0;
}

static ssize_t ep_read(struct fid_ep *ep, void *buffer, size_t length, void *desc, fi_addr_t source, uint64_t address,
                       uint64_t key, void *context)
{
    return transfer(ep, buffer, length, desc, NULL, source, address, key, context, false);
}

static ssize_t ep_write(struct fid_ep *ep, const void *buffer, size_t length, void *desc, fi_addr_t destination,
                        uint64_t address, uint64_t key, void *context)
{
    return transfer(ep, (void *)(uintptr_t)buffer, length, desc, NULL, destination, address, key, context, true);
}

static ssize_t ep_writedata(struct fid_ep *ep, const void *buffer, size_t length, void *desc, uint64_t data,
                            fi_addr_t destination, uint64_t address, uint64_t key, void *context)
{
    return transfer(ep, (void *)(uintptr_t)buffer, length, desc, &data, destination, address, key, context, true);
}

static int setopt(struct fid *fid, int level, int name, const void *value, size_t size)
{
    endpoint *ep = (endpoint *)fid;
    static const char *const names[] = {[FI_OPT_FI_HMEM_P2P] = "p2p", [FI_OPT_CUDA_API_PERMITTED] = "cuda",
                                        [FI_OPT_SHARED_MEMORY_PERMITTED] = "shm"};

    if (level != FI_OPT_ENDPOINT || name < 0 || (size_t)name >= sizeof names / sizeof *names || !names[name])
        return -FI_ENOPROTOOPT;
    if (size != (name == FI_OPT_FI_HMEM_P2P ? sizeof(int) : sizeof(bool)) || ep->enabled)
        return -FI_EINVAL;
    say("setopt %s=%d\n", names[name], name == FI_OPT_FI_HMEM_P2P ? *(const int *)value : *(const bool *)value);
    if (name == FI_OPT_SHARED_MEMORY_PERMITTED)
        return refuses("shm-unknown") ? -FI_ENOPROTOOPT : 0;
    if (name == FI_OPT_CUDA_API_PERMITTED)
        return device() != FI_HMEM_CUDA ? -FI_EINVAL : refuses("cuda") ? -95 : 0;
    return device() == FI_HMEM_SYSTEM ? -FI_EINVAL : refuses("p2p") ? -95 : 0;
}

static int ep_bind(struct fid *fid, struct fid *other, uint64_t flags)
{
    endpoint *ep = (endpoint *)fid;

    if (flags)
        ep->cq = (queue *)other;
    else
        ep->av = (table *)other;
    return 0;
}

static int ep_control(struct fid *fid, int command, void *arg)
{
    endpoint *ep = (endpoint *)fid;

    (void)arg;
    if (command != FI_ENABLE || !ep->cq || !ep->av)
        return -FI_EINVAL;
    pthread_mutex_lock(&lock);
    ep->enabled = true;
    endpoints[ep->number] = ep;
    pthread_mutex_unlock(&lock);
    return 0;
}

static int ep_close(struct fid *fid)
{
    endpoint *ep = (endpoint *)fid;

    pthread_mutex_lock(&lock);
    endpoints[ep->number] = NULL;
    pthread_mutex_unlock(&lock);
    free(ep);
    return 0;
}

static int getname(struct fid *fid, void *address, size_t *size)
{
    memset(address, 0, 32);
    memcpy(address, &((endpoint *)fid)->number, sizeof(uint64_t));
    *size = 32;
    return 0;
}

static struct fi_ops endpoint_ops = {
    .size = sizeof endpoint_ops, .close = ep_close, .bind = ep_bind, .control = ep_control};
static struct fi_ops_ep option_ops = {.size = sizeof option_ops, .setopt = setopt};
static struct fi_ops_cm name_ops = {.size = sizeof name_ops, .getname = getname};
static struct fi_ops_rma rma_ops = {
    .size = sizeof rma_ops, .read = ep_read, .write = ep_write, .writedata = ep_writedata};

static int ep_open(struct fid_domain *fid, struct fi_info *info, struct fid_ep **out, void *context)
{
    endpoint *ep = calloc(1, sizeof *ep);

    (void)info, (void)context;
    ep->fid.fid.ops = &endpoint_ops;
    ep->fid.ops = &option_ops;
    ep->fid.cm = &name_ops;
    ep->fid.rma = &rma_ops;
    ep->of = (domain *)fid;
    pthread_mutex_lock(&lock);
    ep->number = next_endpoint++;
    pthread_mutex_unlock(&lock);
    *out = &ep->fid;
    return 0;
}

static int insert(struct fid_av *fid, const void *address, size_t count, fi_addr_t *out, uint64_t flags, void *context)
{
    table *av = (table *)fid;

    (void)flags, (void)context;
    if (count != 1 || av->count == MOST)
        return -FI_EINVAL;
    pthread_mutex_lock(&lock);
    memcpy(&av->known[av->count], address, sizeof(uint64_t));
    *out = av->count++;
    pthread_mutex_unlock(&lock);
    return 1;
}

static struct fi_ops_av table_ops = {.size = sizeof table_ops, .insert = insert};

static int av_open(struct fid_domain *fid, void *attr, struct fid_av **out, void *context)
{
    table *av = calloc(1, sizeof *av);

    (void)fid, (void)attr, (void)context;
    av->fid.fid.ops = &plain_ops;
    av->fid.ops = &table_ops;
    *out = &av->fid;
    return 0;
}

struct fi_ops_domain domain_ops = {
    .size = sizeof domain_ops, .av_open = av_open, .cq_open = cq_open, .endpoint = ep_open};
