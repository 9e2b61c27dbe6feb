/* A libnvidia-ml.so.1 for nvidia-ml-py whose GPUs stand in $FAKE_NVML_GPUS (fake_nvml.py writes it):
 *
 *   one line for each device, fields apart by '|':
 *   kind|pci|uuid|name|memory|error|node|mig|compute|slices|slice_mib
 *
 * kind: "gpu", "slice" (of the GPU line above it), or "gap" (a number without a slice). error: what every call
 * on the device answers, 0 for none. node: NUMA node that is the GPU's memory, -1 for "not supported".
 * mig: 1 when the GPU is divided. memory 0: "not supported". FAKE_NVML_INIT: what nvmlInit answers.
 * FAKE_NVML_COMPUTE_MODE: of all GPUs; 3 is EXCLUSIVE_PROCESS, 2 PROHIBITED.
 * FAKE_NVML_USED_MIB: memory in use of each GPU.
 * FAKE_NVML_FABRIC: state (3: completed) and first byte of the NVLink domain's UUID; "": not supported.
 * FAKE_NVML_ENERGY: a file with a line "pci mJ mW" for each GPU, read at each call; -1 or no line: "not supported".
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6 };
enum { MAX = 128 };

typedef struct {
    char kind[8], pci[32], uuid[80], name[80];
    unsigned long long memory, slice_mib;
    int error, node;
    unsigned mig, compute, slices;
} Device;

typedef struct { /* nvmlPciInfo_t of NVML 9 and later */
    char legacy[16];
    unsigned domain, bus, device, id, subsystem;
    char bus_id[32];
} PciInfo;

typedef struct { unsigned long long total, free, used; } Memory;

typedef struct {
    unsigned multiprocessors, copy, decoders, encoders, jpeg, ofa, slices, compute;
    unsigned long long memory_mib;
} Attributes;

typedef struct { /* nvmlGpuFabricInfo_v2_t */
    unsigned version;
    unsigned char uuid[16];
    unsigned status, clique;
    unsigned char state;
    unsigned health;
} Fabric;

static Device devices[MAX];
static int count, inits;

int fake_nvml_inits(void) { return inits; }

int nvmlInitWithFlags(unsigned flags) {
    const char *answer = getenv("FAKE_NVML_INIT"), *given = getenv("FAKE_NVML_GPUS");
    (void)flags;
    inits++;
    count = 0;
    for (const char *line = given ? given : ""; *line && count < MAX; count++) {
        Device *d = &devices[count];
        memset(d, 0, sizeof *d);
        if (sscanf(line, "%7[^|]|%31[^|]|%79[^|]|%79[^|]|%llu|%d|%d|%u|%u|%u|%llu", d->kind, d->pci, d->uuid, d->name,
                   &d->memory, &d->error, &d->node, &d->mig, &d->compute, &d->slices, &d->slice_mib) != 11)
            return INVALID;
        line += strcspn(line, "\n");
        line += *line == '\n';
    }
    return answer ? atoi(answer) : SUCCESS;
}

int nvmlShutdown(void) { return SUCCESS; }

const char *nvmlErrorString(int code) {
    return code == 15 ? "GPU is lost" : code == NOT_SUPPORTED ? "Not Supported" : "fake error";
}

int nvmlSystemGetDriverVersion(char *out, unsigned size) {
    snprintf(out, size, "570.86.15");
    return SUCCESS;
}

static int is_gpu(const Device *d) { return strcmp(d->kind, "gpu") == 0; }

int nvmlDeviceGetCount_v2(unsigned *out) {
    *out = 0;
    for (int i = 0; i < count; i++)
        *out += is_gpu(&devices[i]);
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **out) {
    for (int i = 0; i < count; i++)
        if (is_gpu(&devices[i]) && index-- == 0) {
            *out = &devices[i];
            return devices[i].error;
        }
    return INVALID;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, Device **out) {
    for (int i = 0; i < count; i++)
        if (strcmp(devices[i].uuid, uuid) == 0) {
            *out = &devices[i];
            return devices[i].error;
        }
    return NOT_FOUND;
}

/* distributed's monitor asks for it; no use is told of a divided GPU or a slice */
int nvmlDeviceGetUtilizationRates(Device *d, unsigned out[2]) {
    out[0] = out[1] = 0;
    return is_gpu(d) && !d->mig ? d->error : NOT_SUPPORTED;
}

static int text(const Device *d, char *out, unsigned size, const char *from) {
    snprintf(out, size, "%s", from);
    return d->error;
}

static int is_slice(const Device *d) { return strcmp(d->kind, "slice") == 0; }

/* a slice has neither energy nor power */
static int energy(const Device *d, long long *mj, long long *mw) {
    const char *path = getenv("FAKE_NVML_ENERGY");
    FILE *file = path && !is_slice(d) ? fopen(path, "r") : NULL;
    char pci[32] = "";
    *mj = *mw = -1;
    while (file && fscanf(file, "%31s %lld %lld", pci, mj, mw) == 3 && strcmp(pci, d->pci) != 0)
        *mj = *mw = -1;
    if (file)
        fclose(file);
    return d->error;
}

int nvmlDeviceGetTotalEnergyConsumption(Device *d, unsigned long long *out) {
    long long mj, mw;
    int error = energy(d, &mj, &mw);
    *out = (unsigned long long)mj;
    return error ? error : mj < 0 ? NOT_SUPPORTED : SUCCESS;
}

int nvmlDeviceGetPowerUsage(Device *d, unsigned *out) {
    long long mj, mw;
    int error = energy(d, &mj, &mw);
    *out = (unsigned)mw;
    return error ? error : mw < 0 ? NOT_SUPPORTED : SUCCESS;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *pci, Device **out) {
    for (int i = 0; i < count; i++)
        if (is_gpu(&devices[i]) && strcmp(devices[i].pci, pci) == 0) {
            *out = &devices[i];
            return devices[i].error;
        }
    return NOT_FOUND;
}

int nvmlDeviceGetUUID(Device *d, char *out, unsigned size) { return text(d, out, size, d->uuid); }

int nvmlDeviceGetName(Device *d, char *out, unsigned size) { return text(d, out, size, d->name); }

int nvmlDeviceGetPciInfo_v3(Device *d, PciInfo *out) {
    memset(out, 0, sizeof *out);
    snprintf(out->bus_id, sizeof out->bus_id, "%s", d->pci);
    return is_gpu(d) ? d->error : INVALID;
}

int nvmlDeviceGetMemoryInfo(Device *d, Memory *out) {
    const char *given = getenv("FAKE_NVML_USED_MIB");
    unsigned long long used = given ? strtoull(given, NULL, 10) << 20 : 0;
    *out = (Memory){d->memory, d->memory - used, used};
    return d->memory ? d->error : NOT_SUPPORTED;
}

int nvmlDeviceGetComputeMode(Device *d, unsigned *mode) {
    const char *given = getenv("FAKE_NVML_COMPUTE_MODE");
    *mode = given ? (unsigned)atoi(given) : 0;
    return d->error;
}

int nvmlDeviceGetGpuFabricInfoV(Device *d, Fabric *out) {
    const char *given = getenv("FAKE_NVML_FABRIC");
    unsigned state, first;
    if (!given || sscanf(given, "%u %u", &state, &first) != 2)
        return NOT_SUPPORTED;
    out->state = (unsigned char)state;
    memset(out->uuid, 0, sizeof out->uuid);
    out->uuid[0] = (unsigned char)first;
    return d->error;
}

int nvmlDeviceGetMigMode(Device *d, unsigned *current, unsigned *pending) {
    *current = *pending = d->mig;
    return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(Device *d, unsigned *out) {
    *out = d->mig ? 7 : 0;
    return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(Device *d, unsigned index, Device **out) {
    Device *found = d + 1 + index;
    for (Device *between = d + 1; between <= found; between++)
        if (between >= devices + count || is_gpu(between))
            return NOT_FOUND;
    *out = found;
    return strcmp(found->kind, "gap") == 0 ? NOT_FOUND : found->error;
}

int nvmlDeviceGetAttributes_v2(Device *d, Attributes *out) {
    *out = (Attributes){.slices = d->slices, .compute = d->compute, .memory_mib = d->slice_mib};
    return is_gpu(d) ? NOT_SUPPORTED : d->error;
}

#ifndef OLD_DRIVER /* the call is absent before driver 535 */
int nvmlDeviceGetNumaNodeId(Device *d, int *out) {
    *out = d->node;
    return d->node < 0 ? NOT_SUPPORTED : SUCCESS;
}
#endif
