/* Loading libfabric, and choosing from what it offers. */

#include "core.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

int pk_fail(const pk_library *library, pk_failure *failure, int code, const char *what, long error)
{
    failure->code = code;
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
        int wrote = snprintf(failure->text + used, sizeof failure->text - used, "%s%s", used ? ", " : "", name);
        if (wrote < 0 || (size_t)wrote >= sizeof failure->text - used)
            break;
        used += (size_t)wrote;
    }
    library->freeinfo(all);
}

int pk_library_offer(const pk_library *library, const pk_options *options, struct fi_info **chosen, pk_failure *failure)
{
    struct fi_info *hints = library->dupinfo(NULL); /* what fi_allocinfo does */
    struct fi_info *offers = NULL;
    char provider[64];
    char fabric_name[64];

    if (!hints)
        return pk_fail(library, failure, PK_OUT_OF_MEMORY, "fi_allocinfo", 0);
    snprintf(provider, sizeof provider, "%s", options->provider);
    snprintf(fabric_name, sizeof fabric_name, "%s", options->fabric_name ? options->fabric_name : "");
    hints->caps = FI_MSG | FI_RMA;
    hints->mode = FI_CONTEXT | FI_CONTEXT2;
    hints->ep_attr->type = FI_EP_RDM;
    hints->tx_attr->op_flags = FI_DELIVERY_COMPLETE;
    hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
    hints->domain_attr->threading = FI_THREAD_DOMAIN;
    hints->fabric_attr->prov_name = provider;
    hints->fabric_attr->name = options->fabric_name ? fabric_name : NULL;

    int error = library->getinfo(library->api, options->host, NULL, options->host ? FI_SOURCE : 0, hints, &offers);
    hints->fabric_attr->prov_name = NULL; /* freeinfo would free our arrays */
    hints->fabric_attr->name = NULL;
    library->freeinfo(hints);
    if (error && error != -FI_ENODATA)
        return pk_fail(library, failure, PK_FABRIC, "fi_getinfo", error);

    const struct fi_info *pick = NULL;
    for (const struct fi_info *info = offers; info && !pick; info = info->next)
        if (acceptable(info, options->provider, ""))
            pick = info;
    for (const struct fi_info *info = offers; info && !pick; info = info->next)
        if (acceptable(info, options->provider, ";ofi_rxm"))
            pick = info;
    *chosen = pick ? library->dupinfo(pick) : NULL;
    if (offers)
        library->freeinfo(offers);
    if (!pick) {
        list_offers(library, failure);
        failure->code = PK_NO_PROVIDER;
        return PK_NO_PROVIDER;
    }
    return *chosen ? PK_OK : pk_fail(library, failure, PK_OUT_OF_MEMORY, "fi_dupinfo", 0);
}
