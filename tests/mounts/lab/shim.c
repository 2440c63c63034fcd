/* Preloaded under User Mode Linux: Debian's 6.1 has a floating-point buffer smaller than the XSAVE area of CPUs with AMX,
   and the host refuses a PTRACE_SETREGSET(NT_X86_XSTATE) that is too short. Complete it from the child's own state. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdarg.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define NT_X86_XSTATE 0x202

static long raw(long request, long pid, void *address, void *data) {
  return syscall(SYS_ptrace, request, pid, address, data);
}

long ptrace(enum __ptrace_request request, ...) {
  va_list arguments;
  va_start(arguments, request);
  long pid = va_arg(arguments, int);
  void *address = va_arg(arguments, void *);
  void *data = va_arg(arguments, void *);
  va_end(arguments);
  if ((int)request == PTRACE_SETREGSET && (long)address == NT_X86_XSTATE) {
    struct iovec *given = data;
    static _Thread_local char full[16384] __attribute__((aligned(64)));
    struct iovec whole = {full, sizeof full};
    if (raw(PTRACE_GETREGSET, pid, address, &whole) < 0) return -1;
    if (given->iov_len < whole.iov_len) {
      memcpy(full, given->iov_base, given->iov_len);
      return raw(request, pid, address, &whole);
    }
  }
  if (request == PTRACE_PEEKTEXT || request == PTRACE_PEEKDATA || request == PTRACE_PEEKUSER) {
    long word; /* the system call stores the word that the library's function returns */
    long result = raw(request, pid, address, &word);
    if (result < 0) return -1;
    errno = 0;
    return word;
  }
  return raw(request, pid, address, data);
}
