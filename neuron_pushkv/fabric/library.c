/* Loading libfabric, and choosing from what it offers. */

#include "core.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

int pk_fail(const pk_library *library, pk_failure *failure, int code, const char *what, long error)
{
    failure->code = code;
    failure->error = (int)error;
    if (error && library && library->strerror)
        snprintf(failure->text, sizeof failure->text, "%s: %s (%ld)", what, library->strerror((int)-error), error);
    else if (error)
        snprintf(failure->text, sizeof failure->text, "%s: error %ld", what, error);
    else
        snprintf(failure->text, sizeof failure->text, "%s", what);
    return code;
}

/* ISO C has no conversion from an object pointer to a function pointer; POSIX promises that the bits are the same. */
static bool symbol(void *handle, const char *name, void *function)
{
    void *address = dlsym(handle, name);
    memcpy(function, &address, sizeof address);
    return address != NULL;
}

int pk_library_open(pk_library *library, const pk_options *options, pk_failure *failure)
{
    uint32_t (*version)(void);
    Dl_info where;

    memset(library, 0, sizeof *library);
    /* Never closed: providers keep threads and handlers of their own. */
    library->handle = dlopen(options->library, RTLD_NOW | RTLD_LOCAL);
    if (!library->handle) {
        const char *reason = dlerror();
        return pk_fail(NULL, failure, PK_NO_LIBRARY, reason ? reason : options->library, 0);
    }
    if (!symbol(library->handle, "fi_version", &version) ||
        !symbol(library->handle, "fi_getinfo", &library->getinfo) ||
        !symbol(library->handle, "fi_freeinfo", &library->freeinfo) ||
        !symbol(library->handle, "fi_dupinfo", &library->dupinfo) ||
        !symbol(library->handle, "fi_fabric", &library->fabric) ||
        !symbol(library->handle, "fi_strerror", &library->strerror))
        return pk_fail(NULL, failure, PK_NOT_LIBFABRIC, "it does not export fi_getinfo and its kin", 0);
    library->version = version();
    /* A library refuses to be asked for a later API than its own. */
    library->api = library->version < options->api_version ? library->version : options->api_version;
    void *address;
    memcpy(&address, &library->getinfo, sizeof address);
    if (dladdr(address, &where) && where.dli_fname)
        snprintf(library->path, sizeof library->path, "%s", where.dli_fname);
    else
        snprintf(library->path, sizeof library->path, "%s", options->library);
    failure->version = library->version;
    memcpy(failure->library, library->path, sizeof failure->library);
    if (library->version < options->least_version)
        return pk_fail(NULL, failure, PK_TOO_OLD, "too old", 0);
    return PK_OK;
}

/* "tcp" means the tcp provider, alone or with rxm above it as libfabric 1.17 has it; nothing else may stand in. */
static bool acceptable(const struct fi_info *info, const char *provider, const char *layer)
{
    const char *name = info->fabric_attr->prov_name;
    size_t length = strlen(provider);

    return name && strncmp(name, provider, length) == 0 && strcmp(name + length, layer) == 0 &&
           info->domain_attr->cq_data_size >= sizeof(uint32_t) && (info->tx_attr->op_flags & FI_DELIVERY_COMPLETE);
}

bool pk_append_name(char *text, size_t room, size_t *used, const char *name)
{
    int wrote = snprintf(text + *used, room - *used, "%s%s", *used ? ", " : "", name);

    if (wrote < 0 || (size_t)wrote >= room - *used) {
        text[*used] = '\0';
        return false;
    }
    *used += (size_t)wrote;
    return true;
}

static void list_offers(const pk_library *library, pk_failure *failure)
{
    struct fi_info *all = NULL;
    size_t used = 0;

    failure->text[0] = '\0';
    if (library->getinfo(library->api, NULL, NULL, 0, NULL, &all))
        return;
    for (const struct fi_info *info = all; info; info = info->next) {
        const char *name = info->fabric_attr->prov_name;
        bool seen = false;
        for (const struct fi_info *before = all; before != info && !seen; before = before->next)
            seen = strcmp(before->fabric_attr->prov_name, name) == 0;
        if (seen)
            continue;
        if (!pk_append_name(failure->text, sizeof failure->text, &used, name))
            break;
    }
    library->freeinfo(all);
}

const char *pk_nic(const struct fi_info *info)
{
    return info->domain_attr->name ? info->domain_attr->name : "";
}

/* EFA's domains are a card's name and, after a dash, the endpoints' type. */
static bool is_nic(const struct fi_info *info, const char *name, size_t length)
{
    const char *domain = pk_nic(info);

    return strncmp(domain, name, length) == 0 && (domain[length] == '\0' || domain[length] == '-');
}

/* The first offer of each card. */
static uint32_t distinct(struct fi_info *offers, const pk_options *options, const char *layer, struct fi_info **found)
{
    uint32_t count = 0;

    for (struct fi_info *info = offers; info && count < PK_MOST_RAILS; info = info->next) {
        bool seen = false;
        for (uint32_t i = 0; i < count && !seen; i++)
            seen = strcmp(pk_nic(found[i]), pk_nic(info)) == 0;
        if (!seen && acceptable(info, options->provider, layer))
            found[count++] = info;
    }
    return count;
}

/* Those that are named, in that order. Returns how many, or 0 with the failure told. */
static uint32_t named(struct fi_info **found, uint32_t count, const char *names, pk_failure *failure)
{
    struct fi_info *chosen[PK_MOST_RAILS];
    uint32_t chosen_count = 0;
    size_t length;

    for (; *names && chosen_count < PK_MOST_RAILS; names += length + (names[length] == ',')) {
        uint32_t i = 0;
        length = strcspn(names, ",");
        while (i < count && !is_nic(found[i], names, length))
            i++;
        if (i == count) {
            size_t used = 0;
            failure->code = PK_NO_NIC;
            for (i = 0; i < count; i++)
                pk_append_name(failure->text, sizeof failure->text, &used, pk_nic(found[i]));
            return 0;
        }
        chosen[chosen_count++] = found[i];
    }
    memcpy(found, chosen, chosen_count * sizeof *chosen);
    return chosen_count;
}

bool pk_serves_device(const pk_options *options)
{
    return options->interface != FI_HMEM_SYSTEM && strcmp(options->provider, "efa") == 0;
}

static int get_offers(const pk_library *library, const pk_options *options, bool device, struct fi_info **offers,
                      pk_failure *failure)
{
    struct fi_info *hints = library->dupinfo(NULL); /* what fi_allocinfo does */
    char provider[64];
    char fabric_name[64];

    if (!hints)
        return pk_fail(library, failure, PK_OUT_OF_MEMORY, "fi_allocinfo", 0);
    snprintf(provider, sizeof provider, "%s", options->provider);
    snprintf(fabric_name, sizeof fabric_name, "%s", options->fabric_name ? options->fabric_name : "");
    hints->caps = FI_MSG | FI_RMA | (device ? FI_HMEM : 0);
    hints->mode = FI_CONTEXT | FI_CONTEXT2;
    hints->ep_attr->type = FI_EP_RDM;
    hints->tx_attr->op_flags = FI_DELIVERY_COMPLETE;
    hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY |
                                  (device ? FI_MR_HMEM : 0);
    hints->domain_attr->threading = FI_THREAD_DOMAIN;
    hints->fabric_attr->prov_name = provider;
    hints->fabric_attr->name = options->fabric_name ? fabric_name : NULL;

    int error = library->getinfo(library->api, options->host, NULL, options->host ? FI_SOURCE : 0, hints, offers);
    hints->fabric_attr->prov_name = NULL; /* freeinfo would free our arrays */
    hints->fabric_attr->name = NULL;
    library->freeinfo(hints);
    if (error && error != -FI_ENODATA)
        return pk_fail(library, failure, PK_FABRIC, "fi_getinfo", error);
    return PK_OK;
}

/* Among the offers. */
static int choose(const pk_library *library, const pk_options *options, struct fi_info *offers, struct fi_info **infos,
                  uint32_t *rails, pk_failure *failure)
{
    struct fi_info *found[PK_MOST_RAILS];
    uint32_t count = distinct(offers, options, "", found);

    if (!count)
        count = distinct(offers, options, ";ofi_rxm", found);
    if (!count) {
        list_offers(library, failure);
        failure->code = PK_NO_PROVIDER;
        return PK_NO_PROVIDER;
    }
    if (options->nics && !(count = named(found, count, options->nics, failure)))
        return failure->code;
    *rails = options->rails ? options->rails : count;
    for (uint32_t i = 0; i < *rails; i++) {
        infos[i] = library->dupinfo(found[i % count]);
        if (!infos[i]) {
            while (i--)
                library->freeinfo(infos[i]);
            return pk_fail(library, failure, PK_OUT_OF_MEMORY, "fi_dupinfo", 0);
        }
    }
    return PK_OK;
}

int pk_library_offer(const pk_library *library, const pk_options *options, struct fi_info **infos, uint32_t *count,
                     pk_failure *failure)
{
    bool device = pk_serves_device(options);
    struct fi_info *offers = NULL;

    if (options->rails > PK_MOST_RAILS)
        return pk_fail(NULL, failure, PK_BAD_ARGUMENT, "too many rails", 0);
    int code = get_offers(library, options, device, &offers, failure);
    if (!code)
        code = choose(library, options, offers, infos, count, failure);
    if (offers)
        library->freeinfo(offers);
    offers = NULL;
    if (code != PK_NO_PROVIDER || !device || get_offers(library, options, false, &offers, failure) || !offers)
        return code;
    struct fi_info *found[PK_MOST_RAILS];
    if (distinct(offers, options, "", found))
        code = pk_fail(NULL, failure, PK_NO_HMEM, "it is not offered with FI_HMEM", 0);
    library->freeinfo(offers);
    return code;
}
