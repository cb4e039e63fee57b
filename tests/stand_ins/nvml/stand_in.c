/* A stand-in libnvidia-ml.so.1: GPUs that exist only in a text file, which every call reads anew.
 *
 * The file is named by NVML_STAND_IN_STATE and written by stand_in.py (its `State` says what each line means), so that
 * memory, processes, errors and latencies change while a client runs. Structs, version words and the two-call sizing
 * protocol follow nvml.h; whatever the real library does that nvml.h does not say carries its source below.
 */
#define _DEFAULT_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    ARGUMENT_VERSION_MISMATCH = 25,
    UNKNOWN = 999,
};

enum { MAX_DEVICES = 64, MAX_PROCESSES = 256, MAX_RULES = 64, LINE = 1024, TEXT = 128, NO_DEVICE = -1 };

typedef unsigned long long u64;

typedef struct {
    int parent; /* NO_DEVICE: a GPU; otherwise a MIG slice of that one */
    unsigned slot, mig;
    char uuid[TEXT], name[TEXT];
    u64 total, free, reserved;
} Device;

typedef struct {
    int device;
    unsigned pid, late;
    u64 used;
    char name[TEXT];
} Process;

typedef struct {
    int delay; /* otherwise a failure */
    char function[TEXT], uuid[TEXT];
    unsigned amount; /* milliseconds, or the error code */
} Rule;

typedef struct {
    unsigned serial, generation, stride, gpus, devices, processes, rules;
    char driver[TEXT];
    Device device[MAX_DEVICES];
    Process process[MAX_PROCESSES];
    Rule rule[MAX_RULES];
} State;

/* What one client process did to "the driver"; all else is in the file. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static unsigned users, initialised_generation, sized_serial;
static unsigned char sized[MAX_DEVICES];

static void copy(char *to, const char *from) { snprintf(to, TEXT, "%s", from ? from : ""); }

static char *field(char **rest) {
    char *text = strsep(rest, "\t");
    return text ? text : "";
}

static u64 number(char **rest) { return strtoull(field(rest), NULL, 10); }

static void read_line(State *s, char *line) {
    char *rest = line, *kind;
    line[strcspn(line, "\n")] = '\0';
    kind = field(&rest);
    if (!strcmp(kind, "serial")) s->serial = number(&rest);
    else if (!strcmp(kind, "generation")) s->generation = number(&rest);
    else if (!strcmp(kind, "stride")) s->stride = number(&rest);
    else if (!strcmp(kind, "driver")) copy(s->driver, field(&rest));
    else if ((!strcmp(kind, "gpu") || !strcmp(kind, "slice")) && s->devices < MAX_DEVICES) {
        Device *d = &s->device[s->devices++];
        d->parent = *kind == 's' ? (int)number(&rest) : NO_DEVICE;
        if (*kind == 's') d->slot = number(&rest);
        else d->mig = number(&rest), s->gpus++;
        copy(d->uuid, field(&rest));
        copy(d->name, field(&rest));
        d->total = number(&rest), d->free = number(&rest), d->reserved = number(&rest);
    } else if (!strcmp(kind, "process") && s->processes < MAX_PROCESSES) {
        Process *p = &s->process[s->processes++];
        p->device = (int)number(&rest), p->pid = number(&rest), p->used = number(&rest), p->late = number(&rest);
        copy(p->name, field(&rest));
    } else if ((!strcmp(kind, "fail") || !strcmp(kind, "delay")) && s->rules < MAX_RULES) {
        Rule *r = &s->rule[s->rules++];
        r->delay = *kind == 'd';
        copy(r->function, field(&rest));
        copy(r->uuid, field(&rest));
        r->amount = number(&rest);
    }
}

static State *load(void) {
    const char *path = getenv("NVML_STAND_IN_STATE");
    FILE *file = path ? fopen(path, "re") : NULL;
    State *s = file ? calloc(1, sizeof *s) : NULL;
    char line[LINE];
    while (s && fgets(line, sizeof line, file)) read_line(s, line);
    if (file) fclose(file);
    return s;
}

/* "nvmlDeviceGetMemoryInfo*" stands for every version of the function, "*" for any function or device. */
static unsigned amount(const State *s, int delay, const char *function, const char *uuid) {
    for (unsigned i = 0; i < s->rules; i++) {
        const Rule *r = &s->rule[i];
        size_t length = strlen(r->function);
        int same = length && r->function[length - 1] == '*' ? !strncmp(r->function, function, length - 1)
                                                            : !strcmp(r->function, function);
        if (r->delay == delay && same && (!strcmp(r->uuid, "*") || !strcmp(r->uuid, uuid))) return r->amount;
    }
    return 0;
}

/* A handle holds its driver's generation: a client cannot go on with the handles of a driver that was reloaded. */
static void *handle_of(const State *s, unsigned device) {
    return (void *)(uintptr_t)(((u64)s->generation << 16) + device + 1);
}

static int device_of(const State *s, const void *handle) {
    u64 value = (uintptr_t)handle;
    if (value >> 16 != s->generation || !(value & 0xFFFF) || (value & 0xFFFF) > s->devices) return NO_DEVICE;
    return (int)(value & 0xFFFF) - 1;
}

static u64 now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (u64)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

/* Every function begins here: wait as long as the file says (and stops saying), then fail as it says. */
static int enter(State **out, const char *function, const void *handle, int *device) {
    u64 begun_ms = now_ms();
    for (;;) {
        State *s = *out = load();
        int found = s && handle ? device_of(s, handle) : NO_DEVICE;
        const char *uuid = found >= 0 ? s->device[found].uuid : "";
        unsigned code = UNKNOWN;
        if (s && now_ms() - begun_ms < amount(s, 1, function, uuid)) {
            free(s);
            usleep(2000);
            continue;
        }
        if (s) code = amount(s, 0, function, uuid);
        if (s && !code && strncmp(function, "nvmlInit", 8) && (!users || s->generation != initialised_generation))
            code = UNINITIALIZED;
        if (!code && device) *device = found, code = found < 0 ? INVALID_ARGUMENT : SUCCESS;
        if (code) free(s), *out = NULL;
        return (int)code;
    }
}

static int leave(State *s, int code) {
    free(s);
    return code;
}

static int text(char *to, unsigned size, const char *from) {
    if (strlen(from) + 1 > size) return INSUFFICIENT_SIZE;
    strcpy(to, from);
    return SUCCESS;
}

#define NVML(function) __attribute__((visibility("default"))) int function
#define ENTER(handle, device)                                     \
    State *s;                                                     \
    int refused = enter(&s, __func__, (handle), (device));        \
    if (refused) return refused

static int initialise(const char *function) {
    State *s;
    int refused = enter(&s, function, NULL, NULL);
    if (refused) return refused;
    pthread_mutex_lock(&lock);
    users++;
    initialised_generation = s->generation;
    pthread_mutex_unlock(&lock);
    return leave(s, SUCCESS);
}

NVML(nvmlInit)(void) { return initialise(__func__); }
NVML(nvmlInit_v2)(void) { return initialise(__func__); }
NVML(nvmlInitWithFlags)(unsigned flags) { return (void)flags, initialise(__func__); }

NVML(nvmlShutdown)(void) {
    pthread_mutex_lock(&lock);
    int code = users ? SUCCESS : UNINITIALIZED;
    if (users) users--;
    pthread_mutex_unlock(&lock);
    return code;
}

__attribute__((visibility("default"))) const char *nvmlErrorString(int code) {
    return code == UNKNOWN ? "Unknown Error" : "an error of the stand-in";
}

NVML(nvmlSystemGetDriverVersion)(char *to, unsigned size) {
    ENTER(NULL, NULL);
    return leave(s, text(to, size, s->driver));
}

NVML(nvmlSystemGetNVMLVersion)(char *to, unsigned size) {
    ENTER(NULL, NULL);
    return leave(s, text(to, size, "13.580.159.04"));
}

NVML(nvmlSystemGetCudaDriverVersion)(int *version) { return *version = 13000, SUCCESS; }
NVML(nvmlSystemGetCudaDriverVersion_v2)(int *version) { return *version = 13000, SUCCESS; }

NVML(nvmlSystemGetProcessName)(unsigned pid, char *to, unsigned size) {
    ENTER(NULL, NULL);
    for (unsigned i = 0; i < s->processes; i++)
        if (s->process[i].pid == pid && *s->process[i].name) return leave(s, text(to, size, s->process[i].name));
    return leave(s, NOT_FOUND);
}

NVML(nvmlDeviceGetCount_v2)(unsigned *count) {
    ENTER(NULL, NULL);
    *count = s->gpus;
    return leave(s, SUCCESS);
}

/* GPUs come first in the file, so that an index is a place in it. Failures are looked up by the device's uuid here too:
 * a lost GPU refuses the very handle (nvidia-smi: "Unable to determine the device handle for GPU"). */
NVML(nvmlDeviceGetHandleByIndex_v2)(unsigned index, void **handle) {
    State *s = load();
    void *wanted = s && index < s->gpus ? handle_of(s, index) : NULL;
    free(s);
    int refused = enter(&s, __func__, wanted, NULL);
    if (refused) return refused;
    if (!wanted) return leave(s, INVALID_ARGUMENT);
    *handle = wanted;
    return leave(s, SUCCESS);
}

NVML(nvmlDeviceGetHandleByUUID)(const char *uuid, void **handle) {
    ENTER(NULL, NULL);
    for (unsigned i = 0; i < s->devices; i++)
        if (!strcmp(s->device[i].uuid, uuid)) return *handle = handle_of(s, i), leave(s, SUCCESS);
    return leave(s, NOT_FOUND);
}

NVML(nvmlDeviceGetHandleByPciBusId_v2)(const char *bus_id, void **handle) {
    ENTER(NULL, NULL);
    unsigned domain, bus;
    if (sscanf(bus_id, "%x:%x:", &domain, &bus) != 2 || !bus || bus > s->gpus) return leave(s, NOT_FOUND);
    *handle = handle_of(s, bus - 1);
    return leave(s, SUCCESS);
}

NVML(nvmlDeviceGetIndex)(void *handle, unsigned *index) {
    int d;
    ENTER(handle, &d);
    *index = s->device[d].parent < 0 ? (unsigned)d : s->device[d].slot;
    return leave(s, SUCCESS);
}

NVML(nvmlDeviceGetName)(void *handle, char *to, unsigned size) {
    int d;
    ENTER(handle, &d);
    return leave(s, text(to, size, s->device[d].name));
}

NVML(nvmlDeviceGetUUID)(void *handle, char *to, unsigned size) {
    int d;
    ENTER(handle, &d);
    return leave(s, text(to, size, s->device[d].uuid));
}

typedef struct { u64 total, free, used; } MemoryV1;
typedef struct { unsigned version; u64 total, reserved, free, used; } MemoryV2;

NVML(nvmlDeviceGetMemoryInfo)(void *handle, MemoryV1 *memory) {
    int d;
    ENTER(handle, &d);
    const Device *seen = &s->device[d];
    *memory = (MemoryV1){seen->total, seen->free, seen->total - seen->free};
    return leave(s, SUCCESS);
}

NVML(nvmlDeviceGetMemoryInfo_v2)(void *handle, MemoryV2 *memory) {
    int d;
    ENTER(handle, &d);
    const Device *seen = &s->device[d];
    if (memory->version != (sizeof(MemoryV2) | 2u << 24)) return leave(s, ARGUMENT_VERSION_MISMATCH);
    u64 used = seen->total - seen->free - seen->reserved; /* "Allocated device memory": the struct's comment in R590 */
    *memory = (MemoryV2){memory->version, seen->total, seen->reserved, seen->free, used};
    return leave(s, SUCCESS);
}

/* nvitop 1.7.2 raises KeyError on a MIG slice whose BAR1 is not supported. */
NVML(nvmlDeviceGetBAR1MemoryInfo)(void *handle, MemoryV1 *memory) {
    int d;
    ENTER(handle, &d);
    *memory = (MemoryV1){1ull << 37, (1ull << 37) - (1ull << 21), 1ull << 21};
    return leave(s, SUCCESS);
}

typedef struct { unsigned pid; u64 used; } ProcessV1;
typedef struct { unsigned pid; u64 used; unsigned gpu_instance, compute_instance; } ProcessV2;
typedef struct { ProcessV2 common; u64 protected_bytes; } ProcessWide;

/* The sizing call (no room) tells the count; one marked late appears only after the first sizing call on its device. */
static int processes(const char *function, void *handle, unsigned *count, char *to, size_t stride) {
    State *s;
    int d, refused = enter(&s, function, handle, &d);
    if (refused) return refused;
    pthread_mutex_lock(&lock);
    if (sized_serial != s->serial) memset(sized, 0, sizeof sized), sized_serial = s->serial;
    int first = !sized[d];
    sized[d] = 1;
    pthread_mutex_unlock(&lock);
    if (!stride) stride = s->stride;
    unsigned there = 0, room = *count;
    for (unsigned i = 0; i < s->processes; i++) {
        const Process *p = &s->process[i];
        if (p->device != d || (p->late && first)) continue;
        if (to && there < room) {
            ProcessWide entry = {{p->pid, p->used, ~0u, ~0u}, 0};
            if (s->device[d].parent >= 0) {
                entry.common.gpu_instance = s->device[d].slot;
                entry.common.compute_instance = 0;
            }
            memcpy(to + there * stride, &entry, stride);
        }
        there++;
    }
    *count = there;
    return leave(s, there > room ? INSUFFICIENT_SIZE : SUCCESS);
}

NVML(nvmlDeviceGetComputeRunningProcesses)(void *handle, unsigned *count, void *to) {
    return processes(__func__, handle, count, to, sizeof(ProcessV1));
}
NVML(nvmlDeviceGetComputeRunningProcesses_v2)(void *handle, unsigned *count, void *to) {
    return processes(__func__, handle, count, to, sizeof(ProcessV2));
}
/* The one whose struct changed under an unchanged name (nvitop#79, #88, #226): the file names its size. */
NVML(nvmlDeviceGetComputeRunningProcesses_v3)(void *handle, unsigned *count, void *to) {
    return processes(__func__, handle, count, to, 0);
}

static int none(const char *function, void *handle, unsigned *count) {
    int d;
    State *s;
    int refused = enter(&s, function, handle, &d);
    if (refused) return refused;
    *count = 0;
    return leave(s, SUCCESS);
}

NVML(nvmlDeviceGetGraphicsRunningProcesses)(void *handle, unsigned *count, void *to) {
    return (void)to, none(__func__, handle, count);
}
NVML(nvmlDeviceGetGraphicsRunningProcesses_v2)(void *handle, unsigned *count, void *to) {
    return (void)to, none(__func__, handle, count);
}
NVML(nvmlDeviceGetGraphicsRunningProcesses_v3)(void *handle, unsigned *count, void *to) {
    return (void)to, none(__func__, handle, count);
}

NVML(nvmlDeviceGetProcessUtilization)(void *handle, void *samples, unsigned *count, u64 since) {
    int d;
    ENTER(handle, &d);
    (void)samples, (void)count, (void)since;
    return leave(s, NOT_FOUND); /* no sample since then */
}

NVML(nvmlDeviceGetMigMode)(void *handle, unsigned *current, unsigned *pending) {
    int d;
    ENTER(handle, &d);
    *current = *pending = s->device[d].mig;
    return leave(s, SUCCESS);
}

NVML(nvmlDeviceIsMigDeviceHandle)(void *handle, unsigned *is_slice) {
    int d;
    ENTER(handle, &d);
    *is_slice = s->device[d].parent >= 0;
    return leave(s, SUCCESS);
}

NVML(nvmlDeviceGetMaxMigDeviceCount)(void *handle, unsigned *count) {
    int d;
    ENTER(handle, &d);
    *count = s->device[d].mig ? 7 : 0;
    return leave(s, SUCCESS);
}

NVML(nvmlDeviceGetMigDeviceHandleByIndex)(void *handle, unsigned slot, void **slice) {
    int d;
    ENTER(handle, &d);
    for (unsigned i = 0; i < s->devices; i++)
        if (s->device[i].parent == d && s->device[i].slot == slot) return *slice = handle_of(s, i), leave(s, SUCCESS);
    return leave(s, NOT_FOUND);
}

NVML(nvmlDeviceGetDeviceHandleFromMigDeviceHandle)(void *handle, void **parent) {
    int d;
    ENTER(handle, &d);
    if (s->device[d].parent < 0) return leave(s, NOT_FOUND);
    *parent = handle_of(s, (unsigned)s->device[d].parent);
    return leave(s, SUCCESS);
}

static int instance(const char *function, void *handle, unsigned *id, int is_gpu_instance) {
    int d;
    State *s;
    int refused = enter(&s, function, handle, &d);
    if (refused) return refused;
    if (s->device[d].parent < 0) return leave(s, NOT_SUPPORTED);
    *id = is_gpu_instance ? s->device[d].slot : 0;
    return leave(s, SUCCESS);
}

NVML(nvmlDeviceGetGpuInstanceId)(void *handle, unsigned *id) { return instance(__func__, handle, id, 1); }
NVML(nvmlDeviceGetComputeInstanceId)(void *handle, unsigned *id) { return instance(__func__, handle, id, 0); }

typedef struct {
    char bus_id_legacy[16];
    unsigned domain, bus, device, pci_device_id, pci_subsystem_id;
    char bus_id[32];
} Pci;

NVML(nvmlDeviceGetPciInfo_v3)(void *handle, Pci *pci) {
    int d;
    ENTER(handle, &d);
    *pci = (Pci){.bus = (unsigned)d + 1, .pci_device_id = 0x233510DE};
    snprintf(pci->bus_id_legacy, sizeof pci->bus_id_legacy, "0000:%02X:00.0", pci->bus);
    snprintf(pci->bus_id, sizeof pci->bus_id, "00000000:%02X:00.0", pci->bus);
    return leave(s, SUCCESS);
}

/* What monitors show beside memory: steady figures of an idle card. */
static int figure(const char *function, void *handle, unsigned *to, unsigned value) {
    int d;
    State *s;
    int refused = enter(&s, function, handle, &d);
    if (refused) return refused;
    *to = value;
    return leave(s, SUCCESS);
}

NVML(nvmlDeviceGetTemperature)(void *h, unsigned sensor, unsigned *to) {
    return (void)sensor, figure(__func__, h, to, 41);
}
NVML(nvmlDeviceGetFanSpeed)(void *h, unsigned *to) { return figure(__func__, h, to, 30); }
NVML(nvmlDeviceGetPowerUsage)(void *h, unsigned *to) { return figure(__func__, h, to, 75000); }
NVML(nvmlDeviceGetEnforcedPowerLimit)(void *h, unsigned *to) { return figure(__func__, h, to, 700000); }
NVML(nvmlDeviceGetPowerManagementLimit)(void *h, unsigned *to) { return figure(__func__, h, to, 700000); }
NVML(nvmlDeviceGetPersistenceMode)(void *h, unsigned *to) { return figure(__func__, h, to, 1); }
NVML(nvmlDeviceGetPerformanceState)(void *h, unsigned *to) { return figure(__func__, h, to, 0); }
NVML(nvmlDeviceGetComputeMode)(void *h, unsigned *to) { return figure(__func__, h, to, 0); }
NVML(nvmlDeviceGetDisplayActive)(void *h, unsigned *to) { return figure(__func__, h, to, 0); }

NVML(nvmlDeviceGetTemperatureV)(void *handle, unsigned *temperature) {
    if (temperature[0] != (12u | 1u << 24)) return ARGUMENT_VERSION_MISMATCH;
    return figure(__func__, handle, &temperature[2], 41);
}

NVML(nvmlDeviceGetTotalEccErrors)(void *handle, unsigned type, unsigned counter, u64 *to) {
    int d;
    ENTER(handle, &d);
    (void)type, (void)counter, *to = 0;
    return leave(s, SUCCESS);
}

static int pair(const char *function, void *handle, unsigned *one, unsigned *other, unsigned a, unsigned b) {
    int refused = figure(function, handle, one, a);
    if (!refused) *other = b;
    return refused;
}

NVML(nvmlDeviceGetUtilizationRates)(void *h, unsigned *to) { return pair(__func__, h, &to[0], &to[1], 7, 3); }
NVML(nvmlDeviceGetEncoderUtilization)(void *h, unsigned *to, unsigned *us) { return pair(__func__, h, to, us, 0, 99); }
NVML(nvmlDeviceGetDecoderUtilization)(void *h, unsigned *to, unsigned *us) { return pair(__func__, h, to, us, 0, 99); }
NVML(nvmlDeviceGetCudaComputeCapability)(void *h, unsigned *major, unsigned *minor) {
    return pair(__func__, h, major, minor, 9, 0);
}
