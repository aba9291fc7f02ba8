/* Flushing: a device may not see yet what a network card has written to its memory when the card says that it has.
 *
 * A read from the same device over the same card can't overtake those writes, so its answer proves that they are there.
 * So arrivals are held until a cache line has been read, through an endpoint to ourselves, from each device on every rail
 * that has received since the last time.
 */

#include "core.h"

#include <stdlib.h>

#define MOST_DEVICES 32
#define WAIT 200000000LL /* nanoseconds */

int pk_flush_open(pk_core *core, pk_failure *failure)
{
    pk_contact *contacts = calloc(core->rail_count, sizeof *contacts);
    pk_peer *self = calloc(1, sizeof *self + core->rail_count * sizeof *self->endpoints);
    int code = PK_OUT_OF_MEMORY;

    if (!contacts || !self)
        pk_fail(NULL, failure, code, "no memory for an endpoint", 0);
    else
        code = pk_endpoints_open(core, self, contacts, failure);
    if (!code) {
        self->rails = core->rail_count;
        code = pk_endpoints_connect(core, self, contacts, failure);
        if (code) {
            pk_failure other;
            pk_endpoints_close(core, self, &other);
        }
    }
    free(contacts);
    if (code) {
        free(self);
        return code;
    }
    core->self = core->first_peer = self;
    return PK_OK;
}

/* One memory of each device; returns how many. */
static uint32_t memory_of_devices(pk_core *core, const pk_memory **found)
{
    uint32_t count = 0;

    pthread_mutex_lock(&core->lock);
    for (uint32_t i = 0; i < core->memories.size && count < MOST_DEVICES; i++) {
        const pk_memory *memory = core->memories.entries[i].item;
        uint32_t j = 0;
        if (!memory || !memory->parts)
            continue;
        while (j < count && (found[j]->interface != memory->interface || found[j]->device != memory->device))
            j++;
        if (j == count)
            found[count++] = memory;
    }
    pthread_mutex_unlock(&core->lock);
    return count;
}

/* False if one was put off, and all are to be posted again: a read too many does no harm. */
static bool post(pk_core *core, uint32_t index, int64_t now)
{
    pk_rail *rail = &core->rails[index];
    pk_endpoint *endpoint = &core->self->endpoints[index];
    bool from_base = rail->info->domain_attr->mr_mode & FI_MR_VIRT_ADDR;
    const pk_memory *memories[MOST_DEVICES];
    uint32_t count = memory_of_devices(core, memories);

    for (uint32_t i = 0; i < count; i++) {
        const pk_memory *memory = memories[i];
        size_t length = memory->length < PK_LINE ? (size_t)memory->length : PK_LINE;
        pk_op *op = pk_op_take(core, PK_OP_FLUSH, core->self, NULL, index, length);
        if (!op)
            return false;
        ssize_t error = endpoint->ep->rma->read(endpoint->ep, endpoint->door[2], length, endpoint->door_mr->mem_desc,
                                                endpoint->destination, from_base ? memory->address : 0,
                                                memory->parts[index * memory->count].key, op->context);
        if (error) {
            pk_op_release(core, op);
            pk_put_off(core, endpoint, now);
            return false;
        }
        core->flushing++;
    }
    return true;
}

void pk_flush_done(pk_core *core, pk_op *op, bool good)
{
    core->flushing--;
    pthread_mutex_lock(&core->lock);
    core->counters.flushes += good;
    pthread_mutex_unlock(&core->lock);
    if (!good) {
        core->rails[op->rail].to_flush = true;
        pk_put_off(core, &core->self->endpoints[op->rail], pk_now());
    }
}

static void tell(pk_core *core)
{
    pthread_mutex_lock(&core->lock);
    for (uint64_t i = 0; i < core->flushed; i++)
        pk_events_push(core, &core->held[i]);
    core->held_count -= core->flushed;
    for (uint64_t i = 0; i < core->held_count; i++)
        core->held[i] = core->held[core->flushed + i];
    pthread_mutex_unlock(&core->lock);
    core->flushed = 0;
}

uint64_t pk_flush(pk_core *core)
{
    bool posted_all = true;
    int64_t now = pk_now();

    if (!core->flushed) {
        pthread_mutex_lock(&core->lock);
        core->flushed = core->held_count;
        pthread_mutex_unlock(&core->lock);
        if (!core->flushed)
            return 0;
        for (uint32_t i = 0; i < core->rail_count; i++) {
            core->rails[i].to_flush = core->rails[i].dirty;
            core->rails[i].dirty = false;
        }
    }
    for (uint32_t i = 0; i < core->rail_count; i++) {
        pk_rail *rail = &core->rails[i];
        if (rail->to_flush && core->self->endpoints[i].retry_at <= now)
            rail->to_flush = !post(core, i, now);
        posted_all &= !rail->to_flush;
    }
    if (!posted_all || core->flushing)
        return 0;
    tell(core);
    return 1;
}

void pk_flush_wait(pk_core *core)
{
    int64_t until = pk_now() + WAIT;

    while (core->flushing && pk_now() < until)
        pk_complete(core, 1);
}
