/* Counting immediates per slot and epoch, ids, and the queue of events for whoever polls. */

#include "core.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

bool pk_table_add(pk_table *table, void *item, uint64_t *id)
{
    uint32_t i = 0;

    while (i < table->size && table->entries[i].item)
        i++;
    if (i == table->size) {
        uint32_t size = table->size ? 2 * table->size : 16;
        struct pk_entry *entries = realloc(table->entries, size * sizeof *entries);
        if (!entries)
            return false;
        memset(entries + table->size, 0, (size - table->size) * sizeof *entries);
        table->entries = entries;
        table->size = size;
    }
    table->entries[i].item = item;
    *id = (uint64_t)++table->entries[i].generation << 32 | i;
    return true;
}

void *pk_table_get(const pk_table *table, uint64_t id)
{
    uint32_t index = (uint32_t)id;

    return index < table->size && table->entries[index].generation == id >> 32 ? table->entries[index].item : NULL;
}

bool pk_table_had(const pk_table *table, uint64_t id)
{
    uint32_t index = (uint32_t)id;

    return index < table->size && id >> 32 && id >> 32 <= table->entries[index].generation;
}

void pk_table_remove(pk_table *table, uint64_t id)
{
    table->entries[(uint32_t)id].item = NULL;
}

bool pk_events_owe(pk_core *core)
{
    if (core->events_count + core->events_owed >= core->events_size) {
        uint64_t size = core->events_size ? 2 * core->events_size : 64;
        pk_event *events = malloc(size * sizeof *events);
        pk_event *held = malloc(size * sizeof *held);
        if (!events || !held) {
            free(events);
            free(held);
            return false;
        }
        for (uint64_t i = 0; i < core->events_count; i++)
            events[i] = core->events[(core->events_first + i) % core->events_size];
        for (uint64_t i = 0; i < core->held_count; i++)
            held[i] = core->held[i];
        free(core->events);
        free(core->held);
        core->events = events;
        core->held = held;
        core->events_first = 0;
        core->events_size = size;
    }
    core->events_owed++;
    return true;
}

void pk_events_push(pk_core *core, const pk_event *event)
{
    core->events[(core->events_first + core->events_count) % core->events_size] = *event;
    core->events_count++;
    core->events_owed--;
    pthread_cond_signal(&core->happened);
}

/* The goal of a slot is reached, or given up. */
static void settle_goal(pk_core *core, pk_slot *slot, uint32_t index, bool reached)
{
    if (!slot->armed)
        return;
    slot->armed = false;
    if (reached) {
        pk_event event = {.kind = PK_ARRIVED, .slot = index, .epoch = slot->expected - 1, .count = slot->count};
        if (core->flush) {
            core->held[core->held_count++] = event;
            pk_kick(core);
        } else {
            pk_events_push(core, &event);
        }
    } else {
        core->events_owed--;
    }
}

void pk_slot_count(pk_core *core, uint32_t immediate)
{
    uint32_t index = immediate >> PK_EPOCH_BITS;
    pk_slot *slot = &core->slots[index];

    if (slot->expected != (immediate & (PK_EPOCHS - 1)) + 1) {
        core->counters.stale_arrivals++;
        return;
    }
    core->counters.arrivals++;
    slot->count++;
    if (slot->armed && slot->count >= slot->goal)
        settle_goal(core, slot, index, true);
}

int pk_expect(pk_core *core, uint32_t slot, uint32_t epoch, pk_failure *failure)
{
    if (slot >= PK_SLOTS || epoch >= PK_EPOCHS)
        return pk_fail(NULL, failure, PK_BAD_ARGUMENT, "slot or epoch out of range", 0);
    pthread_mutex_lock(&core->lock);
    pk_slot *entry = &core->slots[slot];
    settle_goal(core, entry, slot, false);
    core->expected += !entry->expected;
    *entry = (pk_slot){.expected = epoch + 1};
    pk_kick(core); /* it may have to look more often from now on */
    pthread_mutex_unlock(&core->lock);
    return PK_OK;
}

int pk_goal(pk_core *core, uint32_t slot, uint32_t epoch, uint64_t count, pk_failure *failure)
{
    int code = PK_OK;

    if (slot >= PK_SLOTS || epoch >= PK_EPOCHS || count > UINT32_MAX)
        return pk_fail(NULL, failure, PK_BAD_ARGUMENT, "slot, epoch or count out of range", 0);
    pthread_mutex_lock(&core->lock);
    pk_slot *entry = &core->slots[slot];
    if (entry->expected != epoch + 1) {
        code = pk_fail(NULL, failure, PK_NOT_EXPECTED, "that epoch is not expected at that slot", 0);
    } else if (!entry->armed && !pk_events_owe(core)) {
        code = pk_fail(NULL, failure, PK_OUT_OF_MEMORY, "no memory for an event", 0);
    } else {
        entry->armed = true;
        entry->goal = (uint32_t)count;
        if (entry->count >= entry->goal)
            settle_goal(core, entry, slot, true);
    }
    pthread_mutex_unlock(&core->lock);
    return code;
}

uint64_t pk_count(pk_core *core, uint32_t slot, uint32_t epoch)
{
    uint64_t count = 0;

    if (slot >= PK_SLOTS || epoch >= PK_EPOCHS)
        return 0;
    pthread_mutex_lock(&core->lock);
    if (core->slots[slot].expected == epoch + 1)
        count = core->slots[slot].count;
    pthread_mutex_unlock(&core->lock);
    return count;
}

void pk_forget(pk_core *core, uint32_t slot)
{
    if (slot >= PK_SLOTS)
        return;
    pthread_mutex_lock(&core->lock);
    pk_slot *entry = &core->slots[slot];
    settle_goal(core, entry, slot, false);
    core->expected -= entry->expected != 0;
    *entry = (pk_slot){0};
    pthread_mutex_unlock(&core->lock);
}

int pk_poll(pk_core *core, pk_event *events, int room, int64_t timeout_ns)
{
    struct timespec until;
    int count = 0;

    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += timeout_ns / 1000000000;
    until.tv_nsec += timeout_ns % 1000000000;
    if (until.tv_nsec >= 1000000000) {
        until.tv_sec++;
        until.tv_nsec -= 1000000000;
    }
    pthread_mutex_lock(&core->lock);
    while (!core->events_count && !core->woken && !core->closing && timeout_ns > 0)
        if (pthread_cond_timedwait(&core->happened, &core->lock, &until) == ETIMEDOUT)
            break;
    if (core->closing) {
        pthread_mutex_unlock(&core->lock);
        return -1;
    }
    core->woken = false;
    for (; count < room && core->events_count; count++) {
        events[count] = core->events[core->events_first];
        core->events_first = (core->events_first + 1) % core->events_size;
        core->events_count--;
    }
    pthread_mutex_unlock(&core->lock);
    return count;
}

void pk_wake(pk_core *core)
{
    pthread_mutex_lock(&core->lock);
    core->woken = true;
    pthread_cond_broadcast(&core->happened);
    pthread_mutex_unlock(&core->lock);
}
