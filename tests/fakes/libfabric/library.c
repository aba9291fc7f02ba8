/* From the library down to a domain: what is offered, and to whom. */

#include "fake.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define RMA_EVENT (1ULL << 56)

pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

const char *setting(const char *name, const char *otherwise)
{
    const char *value = getenv(name);
    return value ? value : otherwise;
}

bool refuses(const char *what)
{
    return strstr(setting("FAKE_REFUSE", ""), what) != NULL;
}

int device(void)
{
    return atoi(setting("FAKE_DEVICE", "0"));
}

void say(const char *format, ...)
{
    const char *path = getenv("FAKE_LOG");
    FILE *file = path ? fopen(path, "a") : NULL;
    va_list arguments;

    if (!file)
        return;
    va_start(arguments, format);
    vfprintf(file, format, arguments);
    va_end(arguments);
    fclose(file);
}

static int close_plain(struct fid *fid)
{
    free(fid);
    return 0;
}

struct fi_ops plain_ops = {.size = sizeof plain_ops, .close = close_plain};

static int domain_open(struct fid_fabric *fabric, struct fi_info *info, struct fid_domain **out, void *context)
{
    domain *of = calloc(1, sizeof *of);

    (void)fabric, (void)context;
    of->fid.fid.ops = &plain_ops;
    of->fid.ops = &domain_ops;
    of->fid.mr = &memory_ops;
    of->direct = strcmp(info->fabric_attr->name, "efa-direct") == 0;
    of->hmem = info->caps & FI_HMEM;
    snprintf(of->card, sizeof of->card, "%s", info->domain_attr->name);
    *out = &of->fid;
    return 0;
}

static struct fi_ops_fabric fabric_ops = {.size = sizeof fabric_ops, .domain = domain_open};

EXPORT int fi_fabric(struct fi_fabric_attr *attr, struct fid_fabric **out, void *context)
{
    struct fid_fabric *fabric = calloc(1, sizeof *fabric);

    (void)attr, (void)context;
    fabric->fid.ops = &plain_ops;
    fabric->ops = &fabric_ops;
    *out = fabric;
    return 0;
}

EXPORT uint32_t fi_version(void)
{
    unsigned major = 2, minor = 1;

    sscanf(setting("FAKE_VERSION", "2.1"), "%u.%u", &major, &minor);
    return FI_VERSION(major, minor);
}

EXPORT const char *fi_strerror(int error)
{
    return strerror(error);
}

EXPORT void fi_freeinfo(struct fi_info *info)
{
    while (info) {
        struct fi_info *next = info->next;
        free(info->domain_attr->name);
        free(info->fabric_attr->name);
        free(info->fabric_attr->prov_name);
        free(info->tx_attr);
        free(info->ep_attr);
        free(info->domain_attr);
        free(info->fabric_attr);
        free(info);
        info = next;
    }
}

static char *copy(const char *text)
{
    return text ? strdup(text) : NULL;
}

EXPORT struct fi_info *fi_dupinfo(const struct fi_info *from)
{
    struct fi_info *info = calloc(1, sizeof *info);
    struct fi_tx_attr *tx = calloc(1, sizeof *tx);
    struct fi_ep_attr *ep = calloc(1, sizeof *ep);
    struct fi_domain_attr *of = calloc(1, sizeof *of);
    struct fi_fabric_attr *fabric = calloc(1, sizeof *fabric);

    if (from) {
        *info = *from;
        *tx = *from->tx_attr;
        *ep = *from->ep_attr;
        *of = *from->domain_attr;
        *fabric = *from->fabric_attr;
        of->name = copy(of->name);
        fabric->name = copy(fabric->name);
        fabric->prov_name = copy(fabric->prov_name);
    }
    info->next = NULL;
    info->tx_attr = tx;
    info->ep_attr = ep;
    info->domain_attr = of;
    info->fabric_attr = fabric;
    return info;
}

static struct fi_info *offer(const char *card, size_t length, bool direct, const struct fi_info *hints)
{
    struct fi_info *info = fi_dupinfo(NULL);

    info->caps = FI_MSG | FI_RMA | (hints ? hints->caps & FI_HMEM : 0);
    info->mode = direct ? FI_CONTEXT2 : 0;
    info->addr_format = 11;
    info->tx_attr->op_flags = hints ? hints->tx_attr->op_flags : FI_DELIVERY_COMPLETE;
    info->tx_attr->size = 4096;
    info->ep_attr->type = FI_EP_RDM;
    info->ep_attr->max_msg_size = direct ? LONGEST : SIZE_MAX;
    info->domain_attr->mr_mode = FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_LOCAL;
    if (info->caps & FI_HMEM)
        info->domain_attr->mr_mode |= FI_MR_HMEM;
    info->domain_attr->mr_key_size = 4;
    info->domain_attr->cq_data_size = 4;
    if (asprintf(&info->domain_attr->name, "%.*s-rdm", (int)length, card) < 0)
        abort();
    info->fabric_attr->name = strdup(direct ? "efa-direct" : "efa");
    info->fabric_attr->prov_name = strdup("efa");
    return info;
}

static bool suits(const struct fi_info *hints, bool direct)
{
    const int wanted = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;

    if (!hints)
        return true;
    if (hints->caps & RMA_EVENT || (hints->domain_attr->mr_mode & wanted) != wanted)
        return false;
    if (direct && !(hints->mode & FI_CONTEXT2))
        return false;
    if (hints->caps & FI_HMEM && (device() == FI_HMEM_SYSTEM || !(hints->domain_attr->mr_mode & FI_MR_HMEM)))
        return false;
    const char *provider = hints->fabric_attr->prov_name, *name = hints->fabric_attr->name;
    return (!provider || strcmp(provider, "efa") == 0) && (!name || strcmp(name, direct ? "efa-direct" : "efa") == 0);
}

EXPORT int fi_getinfo(uint32_t version, const char *node, const char *service, uint64_t flags,
                      const struct fi_info *hints, struct fi_info **out)
{
    struct fi_info **end = out;

    (void)node, (void)service, (void)flags;
    *out = NULL;
    if (version > fi_version())
        return -FI_ENOSYS;
    say("getinfo shm=%s hmem=%d\n", setting("FI_EFA_ENABLE_SHM_TRANSFER", "?"), hints && hints->caps & FI_HMEM);
    for (int direct = 0; direct < 2; direct++)
        for (const char *card = setting("FAKE_CARDS", "rdmap201s0"); *card; card += strspn(card, ",")) {
            size_t length = strcspn(card, ",");
            if (suits(hints, direct)) {
                *end = offer(card, length, direct, hints);
                end = &(*end)->next;
            }
            card += length;
        }
    return *out ? 0 : -FI_ENODATA;
}
