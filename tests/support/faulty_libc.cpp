// Preloaded before libc: a disk that is full from some operation on, and a wall clock that jumps.
//
// Every call that makes a file, a name or bytes below a folder is counted. faulty_arm says at which
// of them the disk is full: that call writes half of its bytes, or fails, and those after it fail,
// for good or as often as is said; the environment variable FAULTY_ARM, "AT FAILURES FOLDER", does the
// same from the start of each process. The clock of CLOCK_REALTIME is off by seconds that change with
// the monotonic clock, as the environment variable FAULTY_CLOCK says: "PERIOD OFFSET OFFSET ...".

#define _GNU_SOURCE 1
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include <atomic>

namespace {

char g_folder[PATH_MAX];
std::atomic<long> g_count{0}, g_at{-1}, g_failures{0};

template <typename F>
F next(const char* name) {
  return reinterpret_cast<F>(dlsym(RTLD_NEXT, name));
}

#define NEXT(name) static auto real = next<decltype(&name)>(#name)

bool below(const char* path) {
  size_t length = strlen(g_folder);
  return length && strncmp(path, g_folder, length) == 0 &&
         (path[length] == '/' || path[length] == 0);
}

// The folder of a handle of openat and its kin; empty where it is not below the folder.
bool below_at(int folder, const char* path) {
  if (!g_folder[0]) return false;
  if (path[0] == '/') return below(path);
  char link[64], found[PATH_MAX];
  if (folder == AT_FDCWD)
    snprintf(link, sizeof link, "/proc/self/cwd");
  else
    snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
  ssize_t size = readlink(link, found, sizeof found - 1);
  if (size <= 0) return false;
  found[size] = 0;
  return below(found);
}

bool handle_below(int handle) {
  if (!g_folder[0]) return false;
  char link[64], found[PATH_MAX];
  snprintf(link, sizeof link, "/proc/self/fd/%d", handle);
  ssize_t size = readlink(link, found, sizeof found - 1);
  if (size <= 0) return false;
  found[size] = 0;
  return below(found);
}

// The sync of a folder needs no room: its entries had theirs when they were made.
bool file_below(int handle) {
  struct stat status;
  return handle_below(handle) && fstat(handle, &status) == 0 && !S_ISDIR(status.st_mode);
}

enum Verdict { kGoOn, kHalf, kFail };

// Counts an operation. The first that meets the full disk is done in half where it has bytes.
Verdict count() {
  long number = g_count++, at = g_at;
  if (at < 0 || number < at) return kGoOn;
  if (number == at) return kHalf;
  if (g_failures == 0) return kGoOn;
  g_failures--;
  return kFail;
}

bool fails() { return count() != kGoOn; }

int full() {
  errno = ENOSPC;
  return -1;
}

double clock_offset() {
  static bool read = false;
  static double period = 0;
  static double offsets[64];
  static int number = 0;
  if (!read) {
    const char* text = getenv("FAULTY_CLOCK");
    if (text) {
      char* end;
      period = strtod(text, &end);
      while (number < 64) {
        char* begin = end;
        double value = strtod(begin, &end);
        if (end == begin) break;
        offsets[number++] = value;
      }
    }
    read = true;
  }
  if (period <= 0 || number == 0) return 0;
  struct timespec now;
  static auto real = next<int (*)(clockid_t, struct timespec*)>("clock_gettime");
  real(CLOCK_MONOTONIC, &now);
  long turn = static_cast<long>((now.tv_sec + now.tv_nsec * 1e-9) / period);
  return offsets[turn % number];
}

}  // namespace

extern "C" {

void faulty_arm(const char* folder, long at, long failures);

__attribute__((constructor)) static void arm_from_environment() {
  const char* text = getenv("FAULTY_ARM");
  if (!text) return;
  char* end;
  long at = strtol(text, &end, 10);
  long failures = strtol(end, &end, 10);
  faulty_arm(end + 1, at, failures);
}

void faulty_arm(const char* folder, long at, long failures) {
  strncpy(g_folder, folder, sizeof g_folder - 1);
  g_count = 0;
  g_failures = failures;
  g_at = at;
}

long faulty_count() { return g_count; }

ssize_t write(int handle, const void* data, size_t size) {
  NEXT(write);
  if (handle_below(handle)) {
    Verdict verdict = count();
    if (verdict == kFail || (verdict == kHalf && size < 2)) return full();
    if (verdict == kHalf) size /= 2;
  }
  return real(handle, data, size);
}

ssize_t pwrite(int handle, const void* data, size_t size, off_t at) {
  NEXT(pwrite);
  if (handle_below(handle)) {
    Verdict verdict = count();
    if (verdict == kFail || (verdict == kHalf && size < 2)) return full();
    if (verdict == kHalf) size /= 2;
  }
  return real(handle, data, size, at);
}

ssize_t pwrite64(int handle, const void* data, size_t size, off64_t at) {
  NEXT(pwrite64);
  if (handle_below(handle)) {
    Verdict verdict = count();
    if (verdict == kFail || (verdict == kHalf && size < 2)) return full();
    if (verdict == kHalf) size /= 2;
  }
  return real(handle, data, size, at);
}

ssize_t writev(int handle, const struct iovec* parts, int number) {
  NEXT(writev);
  if (handle_below(handle)) {
    Verdict verdict = count();
    if (verdict == kFail || (verdict == kHalf && number < 2)) return full();
    if (verdict == kHalf) number /= 2;
  }
  return real(handle, parts, number);
}

ssize_t pwritev(int handle, const struct iovec* parts, int number, off_t at) {
  NEXT(pwritev);
  if (handle_below(handle) && fails()) return full();
  return real(handle, parts, number, at);
}

ssize_t pwritev64(int handle, const struct iovec* parts, int number, off64_t at) {
  NEXT(pwritev64);
  if (handle_below(handle) && fails()) return full();
  return real(handle, parts, number, at);
}

ssize_t copy_file_range(int in, off64_t* from, int out, off64_t* to, size_t size, unsigned flags) {
  NEXT(copy_file_range);
  if (handle_below(out) && fails()) return full();
  return real(in, from, out, to, size, flags);
}

ssize_t sendfile(int out, int in, off_t* from, size_t size) {
  static auto real = next<ssize_t (*)(int, int, off_t*, size_t)>("sendfile");
  if (handle_below(out) && fails()) return full();
  return real(out, in, from, size);
}

#define OPEN(name)                                                       \
  int name(const char* path, int flags, ...) {                           \
    static auto real = next<int (*)(const char*, int, ...)>(#name);      \
    va_list rest;                                                        \
    va_start(rest, flags);                                               \
    mode_t mode = flags & O_CREAT ? va_arg(rest, mode_t) : 0;            \
    va_end(rest);                                                        \
    if (flags & O_CREAT && below_at(AT_FDCWD, path) && fails()) return full(); \
    return real(path, flags, mode);                                      \
  }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                     \
  int name(int folder, const char* path, int flags, ...) {               \
    static auto real = next<int (*)(int, const char*, int, ...)>(#name); \
    va_list rest;                                                        \
    va_start(rest, flags);                                               \
    mode_t mode = flags & O_CREAT ? va_arg(rest, mode_t) : 0;            \
    va_end(rest);                                                        \
    if (flags & O_CREAT && below_at(folder, path) && fails()) return full(); \
    return real(folder, path, flags, mode);                              \
  }
OPENAT(openat)
OPENAT(openat64)

int mkdir(const char* path, mode_t mode) {
  NEXT(mkdir);
  if (below_at(AT_FDCWD, path) && fails()) return full();
  return real(path, mode);
}

int mkdirat(int folder, const char* path, mode_t mode) {
  NEXT(mkdirat);
  if (below_at(folder, path) && fails()) return full();
  return real(folder, path, mode);
}

int rename(const char* old, const char* path) {
  static auto real = next<int (*)(const char*, const char*)>("rename");
  if (below_at(AT_FDCWD, path) && fails()) return full();
  return real(old, path);
}

int renameat(int from, const char* old, int to, const char* path) {
  static auto real = next<int (*)(int, const char*, int, const char*)>("renameat");
  if (below_at(to, path) && fails()) return full();
  return real(from, old, to, path);
}

int link(const char* old, const char* path) {
  static auto real = next<int (*)(const char*, const char*)>("link");
  if (below_at(AT_FDCWD, path) && fails()) return full();
  return real(old, path);
}

int linkat(int from, const char* old, int to, const char* path, int flags) {
  NEXT(linkat);
  if (below_at(to, path) && fails()) return full();
  return real(from, old, to, path, flags);
}

int ftruncate(int handle, off_t size) {
  NEXT(ftruncate);
  if (handle_below(handle) && fails()) return full();
  return real(handle, size);
}

int posix_fallocate(int handle, off_t at, off_t size) {
  NEXT(posix_fallocate);
  if (handle_below(handle) && fails()) return ENOSPC;
  return real(handle, at, size);
}

int fallocate(int handle, int mode, off_t at, off_t size) {
  NEXT(fallocate);
  if (handle_below(handle) && fails()) return full();
  return real(handle, mode, at, size);
}

int fsync(int handle) {
  NEXT(fsync);
  if (file_below(handle) && fails()) return full();
  return real(handle);
}

int fdatasync(int handle) {
  NEXT(fdatasync);
  if (file_below(handle) && fails()) return full();
  return real(handle);
}

int clock_gettime(clockid_t which, struct timespec* now) {
  static auto real = next<int (*)(clockid_t, struct timespec*)>("clock_gettime");
  int code = real(which, now);
  if (code == 0 && (which == CLOCK_REALTIME || which == CLOCK_REALTIME_COARSE))
    now->tv_sec += static_cast<time_t>(clock_offset());
  return code;
}

int gettimeofday(struct timeval* now, void* zone) {
  static auto real = next<int (*)(struct timeval*, void*)>("gettimeofday");
  int code = real(now, zone);
  if (code == 0) now->tv_sec += static_cast<time_t>(clock_offset());
  return code;
}

time_t time(time_t* place) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (place) *place = now.tv_sec;
  return now.tv_sec;
}

}  // extern "C"
