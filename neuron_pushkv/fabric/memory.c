/* Memory: ours registered on every rail, in one part or many, and peers' by its description.
 *
 * A description is this head and then the parts' keys, rail by rail, in 64 bits each, all of it little-endian like the
 * machines that there are: magic (4 bytes), rails (2), whether parts are addressed by the base and not from 0 (1), shift
 * (1), length (8), base (8).
 */

#include "core.h"

#include <stdlib.h>
#include <string.h>

#define MAGIC "pkm1"

typedef struct {
    char magic[4];
    uint16_t rails;
    uint8_t virtual_base;
    uint8_t shift;
    uint64_t length;
    uint64_t base;
} head;

/* How many parts of 1 << shift bytes. */
static uint64_t parts_of(uint64_t length, unsigned shift)
{
    return ((length - 1) >> shift) + 1;
}

static bool is_virtual(const pk_core *core)
{
    return core->rails[0].info->domain_attr->mr_mode & FI_MR_VIRT_ADDR;
}

static int register_part(const pk_core *core, const pk_rail *rail, const pk_memory *memory, uint64_t index,
                         const pk_dmabuf *given, pk_part *part)
{
    union {
        struct fi_mr_attr mr;
        unsigned char room[PK_ROOM];
    } attr = {.room = {0}};
    uint64_t start = index << memory->shift;
    uint64_t length = memory->length - start;
    struct fi_mr_dmabuf dmabuf;

    if (memory->shift < PK_WHOLE && length > 1ULL << memory->shift)
        length = 1ULL << memory->shift;
    if (core->most_registered && length > core->most_registered)
        return -FI_EINVAL;
    struct iovec range = {(void *)(uintptr_t)(memory->address + start), length};
    if (given) {
        /* The provider adds the offset again, so that peers address the part by its own addresses. */
        dmabuf = (struct fi_mr_dmabuf){given->fd, given->offset, length,
                                       (void *)(uintptr_t)(memory->address + start - given->offset)};
        attr.mr.dmabuf = &dmabuf;
    } else {
        attr.mr.mr_iov = &range;
    }
    attr.mr.iov_count = 1;
    attr.mr.access = FI_WRITE | FI_REMOTE_WRITE | (core->flush ? FI_REMOTE_READ : 0);
    attr.mr.iface = memory->interface;
    if (memory->interface == FI_HMEM_CUDA)
        attr.mr.device.cuda = memory->device;
    else if (memory->interface == FI_HMEM_NEURON)
        attr.mr.device.neuron = -1; /* not used by efa, whose other users pass this */
    attr.mr.requested_key = pk_secret_key(rail);
    int error = rail->domain->mr->regattr(&rail->domain->fid, &attr, given ? FI_MR_DMABUF : 0, &part->mr);
    if (error) {
        part->mr = NULL;
        return error;
    }
    part->desc = part->mr->mem_desc;
    part->key = part->mr->key;
    return 0;
}

static int close_parts(const pk_core *core, pk_memory *memory)
{
    for (uint64_t i = 0; memory->parts && i < core->rail_count * memory->count; i++) {
        pk_part *part = &memory->parts[i];
        int error = part->mr ? part->mr->fid.ops->close(&part->mr->fid) : 0;
        if (error)
            return error;
        part->mr = NULL;
    }
    free(memory->parts);
    memory->parts = NULL;
    return 0;
}

int pk_memory_register(pk_core *core, pk_memory *memory, pk_failure *failure)
{
    int error = 0;

    memory->count = parts_of(memory->length, memory->shift);
    memory->parts = calloc(core->rail_count * memory->count, sizeof *memory->parts);
    if (!memory->parts)
        return pk_fail(NULL, failure, PK_OUT_OF_MEMORY, "no memory for a registration", 0);
    for (uint32_t rail = 0; rail < core->rail_count && !error; rail++)
        for (uint64_t i = 0; i < memory->count && !error; i++) {
            uint64_t place = rail * memory->count + i;
            error = register_part(core, &core->rails[rail], memory, i, memory->dmabufs ? &memory->dmabufs[place] : NULL,
                                  &memory->parts[place]);
        }
    memory->dmabufs = NULL;
    if (error)
        close_parts(core, memory);
    return error ? pk_fail(&core->library, failure, PK_FABRIC, "fi_mr_regattr", error) : PK_OK;
}

int pk_memory_close(pk_core *core, pk_memory *memory, pk_failure *failure)
{
    int error = close_parts(core, memory);

    return error ? pk_fail(&core->library, failure, PK_FABRIC, "fi_close of a memory region", error) : PK_OK;
}

void pk_memory_free(pk_memory *memory)
{
    free(memory->parts);
    free(memory);
}

int pk_describe(pk_core *core, uint64_t id, uint8_t *description, pk_failure *failure)
{
    int code = PK_OK;

    pthread_mutex_lock(&core->lock);
    const pk_memory *memory = core->closing ? NULL : pk_table_get(&core->memories, id);
    if (core->closing) {
        code = pk_fail(NULL, failure, PK_CLOSED, "the transport is closed", 0);
    } else if (!memory || memory->leaving) {
        code = pk_fail(NULL, failure, PK_UNKNOWN_MEMORY, "that memory is not registered", 0);
    } else {
        head start = {MAGIC, (uint16_t)core->rail_count, is_virtual(core), (uint8_t)memory->shift, memory->length,
                      is_virtual(core) ? memory->address : 0};
        memcpy(description, &start, sizeof start);
        for (uint64_t i = 0; i < core->rail_count * memory->count; i++)
            memcpy(description + sizeof start + i * sizeof memory->parts->key, &memory->parts[i].key,
                   sizeof memory->parts->key);
    }
    pthread_mutex_unlock(&core->lock);
    return code;
}

uint64_t pk_description_size(const pk_core *core, const pk_memory *memory)
{
    return sizeof(head) + core->rail_count * memory->count * sizeof memory->parts->key;
}

/* A target by its description, or NULL for what can't be one. */
static pk_target *read_description(const uint8_t *description, uint64_t size)
{
    head start;
    uint64_t end;

    if (size < sizeof start)
        return NULL;
    memcpy(&start, description, sizeof start);
    if (memcmp(start.magic, MAGIC, sizeof start.magic) != 0 || !start.rails || start.rails > PK_MOST_RAILS ||
        start.virtual_base > 1 || start.shift > PK_WHOLE || !start.length || start.length > 1ULL << PK_WHOLE ||
        parts_of(start.length, start.shift) > PK_MOST_PARTS ||
        __builtin_add_overflow(start.base, start.length - 1, &end))
        return NULL;
    uint64_t keys = start.rails * parts_of(start.length, start.shift);
    pk_target *target = NULL;
    if (size != sizeof start + keys * sizeof *target->keys)
        return NULL;
    target = calloc(1, sizeof *target + keys * sizeof *target->keys);
    if (!target)
        return NULL;
    target->length = start.length;
    target->base = start.base;
    target->virtual_base = start.virtual_base;
    target->shift = start.shift;
    target->count = parts_of(start.length, start.shift);
    target->rails = start.rails;
    memcpy(target->keys, description + sizeof start, keys * sizeof *target->keys);
    return target;
}

int pk_attach(pk_core *core, uint64_t id, const uint8_t *description, uint64_t size, uint64_t *out,
              pk_failure *failure)
{
    pk_target *target = read_description(description, size);
    int code = PK_OK;

    if (!target)
        return pk_fail(NULL, failure, PK_BAD_ARGUMENT,
                       "that is not a description of memory from neuron_pushkv's libfabric transport", 0);
    pthread_mutex_lock(&core->lock);
    pk_peer *peer = pk_usable_peer(core, id, failure);
    if (!peer)
        code = failure->code;
    else if (!peer->connected)
        code = pk_fail(NULL, failure, PK_NOT_CONNECTED, "that peer is not connected yet", 0);
    else if (target->rails < peer->rails)
        code = pk_fail(NULL, failure, PK_BAD_ARGUMENT, "the peer's memory is not registered on all of its rails", 0);
    else if (!pk_table_add(&core->targets, target, &target->id))
        code = pk_fail(NULL, failure, PK_OUT_OF_MEMORY, "no memory for a target", 0);
    if (code) {
        free(target);
    } else {
        target->peer = peer;
        target->next = peer->targets;
        peer->targets = target;
        *out = target->id;
    }
    pthread_mutex_unlock(&core->lock);
    return code;
}

void pk_targets_free(pk_core *core, pk_peer *peer)
{
    while (peer->targets) {
        pk_target *target = peer->targets;
        peer->targets = target->next;
        if (core->targets.entries)
            pk_table_remove(&core->targets, target->id);
        free(target);
    }
}
