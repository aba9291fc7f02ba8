/* Tickets: a batch's tables, the place that posting has got to in them, and how a ticket ends. */

#include "core.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* a + b, or false if that does not fit. */
static bool add(uint64_t a, uint64_t b, uint64_t *sum)
{
    return !__builtin_add_overflow(a, b, sum);
}

/* Copy a product's tables; sum up how far its runs reach, and their bytes. */
static bool copy_product(pk_mapped_product *to, const pk_product *from, uint64_t *bytes, const char **problem)
{
    uint64_t end;

    *problem = "the tables are too large";
    if (!from->span_count || !from->run_count) {
        *problem = "a product without spans or runs";
        return false;
    }
    to->spans = calloc(from->span_count, sizeof *to->spans);
    to->runs = calloc(from->run_count, sizeof *to->runs);
    if (!to->spans || !to->runs)
        return false;
    to->span_count = from->span_count;
    to->run_count = from->run_count;
    memcpy(to->runs, from->runs, from->run_count * sizeof *to->runs);
    for (uint64_t i = 0; i < to->run_count; i++) {
        const pk_run *run = &to->runs[i];
        if (!run->length) {
            *problem = "a run of no bytes";
            return false;
        }
        if (!add(run->local, run->length, &end))
            return false;
        if (end > to->local_end)
            to->local_end = end;
        if (!add(run->remote, run->length, &end))
            return false;
        if (end > to->remote_end)
            to->remote_end = end;
        if (!add(*bytes, run->length, bytes))
            return false;
    }
    return true;
}

pk_ticket *pk_ticket_new(const pk_product *products, uint64_t count, pk_failure *failure)
{
    const char *problem = "out of memory";
    pk_ticket *ticket = calloc(1, sizeof *ticket);

    if (!ticket || (count && !(ticket->products = calloc(count, sizeof *ticket->products))))
        goto bad;
    ticket->product_count = count;
    for (uint64_t i = 0; i < count; i++) {
        uint64_t bytes = 0;
        if (!copy_product(&ticket->products[i], &products[i], &bytes, &problem))
            goto bad;
        problem = "the tables are too large";
        if (__builtin_mul_overflow(bytes, products[i].span_count, &bytes) || !add(ticket->bytes, bytes, &ticket->bytes))
            goto bad;
    }
    return ticket;
bad:
    if (ticket)
        pk_ticket_free(ticket);
    pk_fail(NULL, failure, PK_BAD_ARGUMENT, problem, 0);
    return NULL;
}

static int map_span(pk_core *core, const pk_ticket *ticket, const pk_mapped_product *product, const pk_span *span,
                    pk_mapped_span *mapped, pk_failure *failure)
{
    const pk_memory *memory = pk_table_get(&core->memories, span->memory);
    const pk_target *target = pk_table_get(&core->targets, span->target);
    uint64_t end;

    if (!memory || memory->leaving)
        return pk_fail(NULL, failure, PK_UNKNOWN_MEMORY, "a span names memory that is not registered", 0);
    if (!target || target->peer != ticket->peer)
        return pk_fail(NULL, failure, PK_UNKNOWN_TARGET, "a span names memory of the peer that is not attached", 0);
    if (span->local < memory->address || !add(span->local - memory->address, product->local_end, &end) ||
        end > memory->length)
        return pk_fail(NULL, failure, PK_BAD_ARGUMENT, "a run leaves the registered memory of its span", 0);
    if (!add(span->offset, product->remote_end, &end) || end > target->length)
        return pk_fail(NULL, failure, PK_BAD_ARGUMENT, "a run leaves the peer's memory that its span names", 0);
    *mapped = (pk_mapped_span){NULL, target, span->local - memory->address, span->offset};
    return PK_OK;
}

static uint64_t smaller(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* Bytes until the part that offset is in ends. */
static uint64_t room_in_part(uint64_t offset, unsigned shift)
{
    return (1ULL << shift) - (offset & ((1ULL << shift) - 1));
}

static uint64_t length_of_piece(const pk_memory *memory, const pk_target *target, uint64_t local, uint64_t remote,
                                uint64_t left, uint64_t limit)
{
    return smaller(smaller(left, limit),
                   smaller(room_in_part(local, memory->shift), room_in_part(remote, target->shift)));
}

/* How many writes the runs of one span come to. */
static uint64_t count_writes(const pk_ticket *ticket, const pk_mapped_product *product, const pk_mapped_span *span,
                             const pk_memory *memory)
{
    uint64_t writes = 0;

    for (uint64_t i = 0; i < product->run_count; i++) {
        const pk_run *run = &product->runs[i];
        uint64_t done = 0;
        for (; done < run->length; writes++)
            done += length_of_piece(memory, span->target, span->local + run->local + done,
                                    span->remote + run->remote + done, run->length - done, ticket->limit);
    }
    return writes;
}

static bool count_all(pk_core *core, pk_ticket *ticket, const pk_product *products)
{
    for (uint64_t i = 0; i < ticket->product_count; i++) {
        const pk_mapped_product *product = &ticket->products[i];
        uint64_t whole = 0; /* as where nothing is in parts */
        for (uint64_t j = 0; j < product->span_count; j++) {
            const pk_mapped_span *span = &product->spans[j];
            const pk_memory *memory = pk_table_get(&core->memories, products[i].spans[j].memory);
            bool in_parts = memory->count > 1 || span->target->count > 1;
            uint64_t writes = in_parts || !whole ? count_writes(ticket, product, span, memory) : whole;
            if (!in_parts)
                whole = writes;
            if (!add(ticket->writes, writes, &ticket->writes))
                return false;
        }
    }
    return ticket->writes <= UINT32_MAX; /* the receiver counts in 32 bits */
}

int pk_ticket_map(pk_core *core, pk_ticket *ticket, const pk_product *products, pk_failure *failure)
{
    ticket->limit = core->facts.max_message;
    if (ticket->peer->rails > 1)
        ticket->limit = smaller(ticket->limit, core->stripe);
    for (uint64_t i = 0; i < ticket->product_count; i++) {
        pk_mapped_product *product = &ticket->products[i];
        for (uint64_t j = 0; j < product->span_count; j++) {
            int code = map_span(core, ticket, product, &products[i].spans[j], &product->spans[j], failure);
            if (code)
                return code;
        }
    }
    if (!count_all(core, ticket, products))
        return pk_fail(NULL, failure, PK_BAD_ARGUMENT, "the tables are too large", 0);
    /* All are good: only now count the uses, so that a refusal leaves nothing to undo. */
    for (uint64_t i = 0; i < ticket->product_count; i++)
        for (uint64_t j = 0; j < ticket->products[i].span_count; j++) {
            pk_memory *memory = pk_table_get(&core->memories, products[i].spans[j].memory);
            memory->users++;
            ticket->products[i].spans[j].memory = memory;
        }
    return PK_OK;
}

void pk_ticket_free(pk_ticket *ticket)
{
    for (uint64_t i = 0; i < ticket->product_count; i++) {
        pk_mapped_product *product = &ticket->products[i];
        for (uint64_t j = 0; j < product->span_count; j++)
            if (product->spans[j].memory)
                product->spans[j].memory->users--;
        free(product->spans);
        free(product->runs);
    }
    free(ticket->products);
    free(ticket);
}

bool pk_ticket_ready(const pk_ticket *ticket)
{
    if (!ticket->ready)
        return true;
    uint32_t word = __atomic_load_n(ticket->ready, __ATOMIC_ACQUIRE);
    return word - ticket->ready_value < 1u << 31; /* reached or passed, on a circle */
}

pk_piece pk_ticket_piece(const pk_ticket *ticket)
{
    const pk_mapped_product *product = &ticket->products[ticket->product];
    const pk_mapped_span *span = &product->spans[ticket->span];
    const pk_run *run = &product->runs[ticket->run];
    uint64_t local = span->local + run->local + ticket->done;
    uint64_t remote = span->remote + run->remote + ticket->done;
    uint64_t length =
        length_of_piece(span->memory, span->target, local, remote, run->length - ticket->done, ticket->limit);

    return (pk_piece){span->memory, span->target, local, remote, length};
}

void pk_ticket_advance(pk_ticket *ticket, uint64_t length)
{
    const pk_mapped_product *product = &ticket->products[ticket->product];

    ticket->posted++;
    ticket->done += length;
    if (ticket->done < product->runs[ticket->run].length)
        return;
    ticket->done = 0;
    if (++ticket->run < product->run_count)
        return;
    ticket->run = 0;
    if (++ticket->span < product->span_count)
        return;
    ticket->span = 0;
    ticket->product++;
}

static void append(pk_peer *peer, pk_ticket *ticket)
{
    ticket->next = NULL;
    ticket->previous = peer->last;
    if (peer->last)
        peer->last->next = ticket;
    else
        peer->first = ticket;
    peer->last = ticket;
}

static void take_out(pk_peer *peer, pk_ticket *ticket)
{
    if (ticket->previous)
        ticket->previous->next = ticket->next;
    else if (peer->first == ticket)
        peer->first = ticket->next;
    else
        peer->draining = ticket->next;
    if (ticket->next)
        ticket->next->previous = ticket->previous;
    else if (peer->last == ticket)
        peer->last = ticket->previous;
    ticket->next = ticket->previous = NULL;
}

void pk_ticket_start(pk_core *core, pk_ticket *ticket)
{
    append(ticket->peer, ticket);
    core->unposted++;
    if (!ticket->writes) {
        pk_ticket_stop(core, ticket, NULL);
        pk_ticket_settle(core, ticket);
    }
}

void pk_ticket_rotate(pk_ticket *ticket)
{
    take_out(ticket->peer, ticket);
    append(ticket->peer, ticket);
}

void pk_ticket_stop(pk_core *core, pk_ticket *ticket, const char *text)
{
    if (text && !ticket->detail[0])
        snprintf(ticket->detail, sizeof ticket->detail, "%s", text);
    if (ticket->stopped)
        return;
    ticket->stopped = true;
    core->unposted--;
    take_out(ticket->peer, ticket);
    ticket->next = ticket->peer->draining;
    if (ticket->next)
        ticket->next->previous = ticket;
    ticket->peer->draining = ticket;
}

void pk_ticket_settle(pk_core *core, pk_ticket *ticket)
{
    pk_event event = {0};

    if (!ticket->stopped || ticket->outstanding)
        return;
    event.ticket = ticket->id;
    event.written = ticket->written;
    event.in_doubt = ticket->in_doubt;
    if (ticket->written == ticket->writes) {
        event.kind = PK_WRITTEN;
    } else {
        event.kind = PK_FAILED;
        snprintf(event.detail, sizeof event.detail, "%s", ticket->detail);
    }
    take_out(ticket->peer, ticket);
    pthread_mutex_lock(&core->lock);
    pk_events_push(core, &event);
    core->counters.tickets--;
    pk_ticket_free(ticket);
    pthread_mutex_unlock(&core->lock);
}
