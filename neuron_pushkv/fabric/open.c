/* Opening and closing a core, and what it says of itself. */

#include "core.h"

#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

/* Bytes. efa takes writes of any length, but makes several of those beyond what a card can do at once (1 GiB where it is
 * known), each with the immediate, so that they would be counted more than once. */
#define LONGEST_EFA_WRITE (64ULL << 20)

static int start(pk_core *core, int cpu, pk_failure *failure)
{
    pthread_condattr_t attr;
    pthread_attr_t thread;
    cpu_set_t *cpus = NULL;
    int error = 0;

    pthread_attr_init(&thread);
    if (cpu >= 0) {
        size_t size = CPU_ALLOC_SIZE((size_t)cpu + 1);
        cpus = CPU_ALLOC((size_t)cpu + 1);
        if (cpus) {
            CPU_ZERO_S(size, cpus);
            CPU_SET_S((size_t)cpu, size, cpus);
            error = pthread_attr_setaffinity_np(&thread, size, cpus);
        } else {
            error = ENOMEM;
        }
    }
    pthread_mutex_init(&core->lock, NULL);
    pthread_cond_init(&core->answered, NULL);
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&core->happened, &attr);
    pthread_condattr_destroy(&attr);
    if (!error)
        error = pthread_create(&core->thread, &thread, pk_progress, core);
    pthread_attr_destroy(&thread);
    if (cpus)
        CPU_FREE(cpus);
    if (error && cpu >= 0 && error != EAGAIN && error != ENOMEM)
        return pk_fail(NULL, failure, PK_NO_CPU, "the progress thread can't run on that CPU", 0);
    return error ? pk_fail(NULL, failure, PK_OUT_OF_MEMORY, "no thread could be started", 0) : PK_OK;
}

static void describe(pk_core *core)
{
    const struct fi_info *info = core->rails[0].info;
    pk_facts *facts = &core->facts;
    size_t used = 0;

    facts->version = core->library.version;
    facts->address_format = info->addr_format;
    memcpy(facts->library, core->library.path, sizeof facts->library);
    snprintf(facts->provider, sizeof facts->provider, "%s", info->fabric_attr->prov_name);
    snprintf(facts->fabric, sizeof facts->fabric, "%s", info->fabric_attr->name ? info->fabric_attr->name : "");
    facts->rails = core->rail_count;
    facts->memory_mode = (uint64_t)info->domain_attr->mr_mode;
    facts->key_size = info->domain_attr->mr_key_size;
    facts->max_message = UINT64_MAX;
    facts->tx_depth = UINT32_MAX;
    facts->takes_dmabufs = core->rails[0].interface != FI_HMEM_SYSTEM && core->library.api >= FI_VERSION(1, 20);
    facts->waits = 1;
    for (uint32_t i = 0; i < core->rail_count; i++) {
        const pk_rail *rail = &core->rails[i];
        size_t most = rail->info->ep_attr->max_msg_size;
        if (most && most < facts->max_message)
            facts->max_message = most;
        if (rail->over_efa && facts->max_message > LONGEST_EFA_WRITE)
            facts->max_message = LONGEST_EFA_WRITE;
        if (rail->depth < facts->tx_depth)
            facts->tx_depth = rail->depth;
        facts->waits &= rail->wait_fd >= 0;
        pk_append_name(facts->domains, sizeof facts->domains, &used, pk_nic(rail->info));
    }
}

static int open_rails(pk_core *core, const pk_options *options, pk_failure *failure)
{
    struct fi_info *infos[PK_MOST_RAILS];
    uint32_t count = 0;

    int code = pk_library_offer(&core->library, options, infos, &count, failure);
    for (uint32_t i = 0; i < count; i++)
        if (!code)
            code = pk_rail_open(&core->rails[core->rail_count++], &core->library, options, infos[i], failure);
        else
            core->library.freeinfo(infos[i]);
    return code;
}

int pk_open(const pk_options *options, pk_core **opened, pk_failure *failure)
{
    pk_core *core = calloc(1, sizeof *core);

    if (!core)
        return pk_fail(NULL, failure, PK_OUT_OF_MEMORY, "no memory for the core", 0);
    core->stripe = options->stripe;
    core->most_registered = options->most_registered;
    core->flush = options->flush;
    core->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    /* 16 MiB of which only the pages that are used are ever backed by memory */
    core->slots = calloc(PK_SLOTS, sizeof *core->slots);
    int code = PK_OUT_OF_MEMORY;
    if (core->wake_fd < 0 || !core->slots)
        pk_fail(NULL, failure, code, "no memory or descriptor for the core", 0);
    else
        code = pk_library_open(&core->library, options, failure);
    if (!code)
        code = open_rails(core, options, failure);
    if (!code) {
        describe(core);
        if (options->flush)
            code = pk_flush_open(core, failure);
    }
    if (!code)
        code = start(core, options->cpu, failure);
    if (code) {
        pk_failure other;
        if (core->self)
            pk_endpoints_close(core, core->self, &other); /* nothing was posted yet */
        free(core->self);
        for (uint32_t i = 0; i < core->rail_count; i++)
            pk_rail_close(&core->rails[i], &core->library);
        if (core->wake_fd >= 0)
            close(core->wake_fd);
        free(core->slots);
        free(core);
        return code;
    }
    *opened = core;
    return PK_OK;
}

void pk_close(pk_core *core)
{
    pthread_mutex_lock(&core->lock);
    bool first = !core->closing;
    core->closing = true;
    pk_kick(core);
    pthread_cond_broadcast(&core->happened);
    pthread_mutex_unlock(&core->lock);
    if (first)
        pthread_join(core->thread, NULL);
    pthread_mutex_lock(&core->lock);
    core->closed |= first;
    pthread_cond_broadcast(&core->answered);
    while (!core->closed)
        pthread_cond_wait(&core->answered, &core->lock);
    pthread_mutex_unlock(&core->lock);
}

void pk_free(pk_core *core)
{
    pthread_cond_destroy(&core->answered);
    pthread_cond_destroy(&core->happened);
    pthread_mutex_destroy(&core->lock);
    close(core->wake_fd);
    free(core->events);
    free(core->held);
    free(core->slots);
    free(core);
}

void pk_get_facts(pk_core *core, pk_facts *facts)
{
    *facts = core->facts;
}

void pk_get_counters(pk_core *core, pk_counters *counters)
{
    pthread_mutex_lock(&core->lock);
    *counters = core->counters;
    pthread_mutex_unlock(&core->lock);
}

void pk_get_rail_bytes(pk_core *core, uint64_t *bytes)
{
    pthread_mutex_lock(&core->lock);
    for (uint32_t i = 0; i < core->rail_count; i++)
        bytes[i] = core->rails[i].bytes;
    pthread_mutex_unlock(&core->lock);
}
