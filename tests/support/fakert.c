/* A CUDA runtime for CuPy, over whatever libcuda.so.1 a process finds (fake_cuda.c): real_cupy.py links it into CuPy.
 *
 * NVIDIA's own asks the driver for tables that are not public, and checks the answers. What is not here answers 801,
 * which real_cupy.py adds: kernels, graphs, textures.
 */
#define _GNU_SOURCE
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef int (*Call)();
typedef unsigned long long Address;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static void *library, *primary;
static int refusal;
static __thread int last;

static Call in_driver(const char *name) {
    static Call missing;
    Call call = library ? (Call)dlsym(library, name) : missing;
    if (!call)
        fprintf(stderr, "fake CUDA runtime: the driver has no %s\n", name);
    return call;
}
#define DRIVER(name, ...) in_driver(#name)(__VA_ARGS__)

static void start(void) {
    int device;
    library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (!library) {
        refusal = cudaErrorInsufficientDriver;
        return;
    }
    refusal = DRIVER(cuInit, 0);
    if (!refusal)
        refusal = DRIVER(cuDeviceGet, &device, 0);
    if (!refusal)
        refusal = DRIVER(cuDevicePrimaryCtxRetain, &primary, device);
}

static int started(void) {
    pthread_once(&once, start);
    return refusal;
}

/* As the runtime does: a thread without a context gets the primary one. */
static int entered(void) {
    void *current = NULL;
    if (started())
        return refusal;
    DRIVER(cuCtxGetCurrent, &current);
    return current ? 0 : DRIVER(cuCtxSetCurrent, primary);
}

static cudaError_t answer(int code) {
    if (code)
        last = code;
    return (cudaError_t)code;
}

#define ASK(name, ...)                                                                                                 \
    do {                                                                                                               \
        int refused = entered();                                                                                       \
        return answer(refused ? refused : DRIVER(name, __VA_ARGS__));                                                  \
    } while (0)

cudaError_t cudaGetLastError(void) {
    int code = last;
    last = 0;
    return (cudaError_t)code;
}
const char *cudaGetErrorName(cudaError_t error) {
    static __thread char text[32];
    snprintf(text, sizeof text, error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaError%d", error);
    return text;
}
const char *cudaGetErrorString(cudaError_t error) {
    return error == cudaErrorMemoryAllocation ? "out of memory" : "an error of the stand-in";
}
cudaError_t cudaRuntimeGetVersion(int *out) {
    *out = 13000;
    return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int *out) { return answer(started() ? refusal : DRIVER(cuDriverGetVersion, out)); }

cudaError_t cudaGetDevice(int *out) {
    *out = 0;
    return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) { return answer(device ? cudaErrorInvalidDevice : entered()); }
cudaError_t cudaGetDeviceCount(int *out) {
    *out = 0;
    return answer(started() ? refusal : DRIVER(cuDeviceGetCount, out));
}
cudaError_t cudaDeviceGetAttribute(int *out, enum cudaDeviceAttr attribute, int device) {
    return answer(started() ? refusal : DRIVER(cuDeviceGetAttribute, out, (int)attribute, device));
}
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *out, int device) {
    (void)device;
    memset(out, 0, sizeof *out);
    strcpy(out->name, "fake");
    out->major = 9;
    out->warpSize = 32;
    return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize(void) { ASK(cuCtxSynchronize); }
cudaError_t cudaDeviceCanAccessPeer(int *out, int one, int other) {
    (void)one;
    (void)other;
    *out = 0;
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) { ASK(cuMemGetInfo, free_bytes, total); }
cudaError_t cudaMalloc(void **out, size_t nbytes) { ASK(cuMemAlloc, out, nbytes); }
cudaError_t cudaFree(void *at) {
    if (!at)
        return cudaSuccess;
    ASK(cuMemFree, (Address)at); /* it waits for the device */
}
cudaError_t cudaMallocAsync(void **out, size_t nbytes, cudaStream_t stream) { ASK(cuMemAllocAsync, out, nbytes, stream); }
cudaError_t cudaFreeAsync(void *at, cudaStream_t stream) { ASK(cuMemFreeAsync, (Address)at, stream); }
cudaError_t cudaHostAlloc(void **out, size_t nbytes, unsigned flags) { ASK(cuMemHostAlloc, out, nbytes, flags); }
cudaError_t cudaFreeHost(void *at) { ASK(cuMemFreeHost, at); }

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t nbytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
    (void)kind;
    ASK(cuMemcpyAsync, (Address)to, (Address)from, nbytes, stream);
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t nbytes, enum cudaMemcpyKind kind) {
    cudaError_t code = cudaMemcpyAsync(to, from, nbytes, kind, NULL);
    return code ? code : answer(DRIVER(cuStreamSynchronize, NULL));
}
cudaError_t cudaMemset(void *to, int value, size_t nbytes) {
    ASK(cuMemsetD8Async, (Address)to, (unsigned char)value, nbytes, NULL);
}
cudaError_t cudaMemsetAsync(void *to, int value, size_t nbytes, cudaStream_t stream) {
    ASK(cuMemsetD8Async, (Address)to, (unsigned char)value, nbytes, stream);
}
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *out, const void *at) {
    int kind = 0, refused = entered();
    if (refused)
        return answer(refused);
    memset(out, 0, sizeof *out);
    if (!DRIVER(cuPointerGetAttribute, &kind, 2, (Address)at))
        out->type = (enum cudaMemoryType)kind;
    out->devicePointer = (void *)at;
    return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t *out) { ASK(cuStreamCreate, out, 0); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned flags) { ASK(cuStreamCreate, out, flags); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *out, unsigned flags, int priority) {
    ASK(cuStreamCreateWithPriority, out, flags, priority);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) { ASK(cuStreamDestroy, stream); }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { ASK(cuStreamSynchronize, stream); }
cudaError_t cudaStreamQuery(cudaStream_t stream) { ASK(cuStreamQuery, stream); }
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    ASK(cuStreamWaitEvent, stream, event, flags);
}
cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned *out) { ASK(cuStreamGetFlags, stream, out); }
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *out) { ASK(cuStreamGetPriority, stream, out); }
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *out) {
    ASK(cuStreamIsCapturing, stream, out);
}

cudaError_t cudaEventCreate(cudaEvent_t *out) { ASK(cuEventCreate, out, 0); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned flags) { ASK(cuEventCreate, out, flags); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { ASK(cuEventDestroy, event); }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { ASK(cuEventRecord, event, stream); }
cudaError_t cudaEventSynchronize(cudaEvent_t event) { ASK(cuEventSynchronize, event); }
cudaError_t cudaEventQuery(cudaEvent_t event) { ASK(cuEventQuery, event); }

cudaError_t cudaDeviceGetMemPool(cudaMemPool_t *out, int device) { ASK(cuDeviceGetMemPool, out, device); }
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *out, int device) { ASK(cuDeviceGetDefaultMemPool, out, device); }
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *out) {
    ASK(cuMemPoolGetAttribute, pool, attribute, out);
}
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *value) {
    ASK(cuMemPoolSetAttribute, pool, attribute, value);
}
