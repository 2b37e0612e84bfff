/* Lets an older user-mode kernel run where processors have more registers than it knows (AMX).
 *
 * It writes its processes' registers back with ptrace, as many as it has room for; newer hosts take
 * all of them or nothing (EFAULT). Then what it knows is laid over all that there are. Preloaded
 * into linux.uml; does nothing where the host takes what it is given.
 */
#include <elf.h>
#include <errno.h>
#include <stdarg.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static char registers[1 << 16];

long ptrace(enum __ptrace_request request, ...)
{
	va_list rest;
	va_start(rest, request);
	long pid = va_arg(rest, int);
	void *address = va_arg(rest, void *), *data = va_arg(rest, void *);
	va_end(rest);

	if (request == PTRACE_PEEKTEXT || request == PTRACE_PEEKDATA || request == PTRACE_PEEKUSER) {
		long word = 0;
		if (syscall(SYS_ptrace, request, pid, address, &word))
			return -1;
		errno = 0;
		return word;
	}
	long done = syscall(SYS_ptrace, request, pid, address, data);
	int refused = done && errno == EFAULT && request == PTRACE_SETREGSET;
	if (!refused || (long)address != NT_X86_XSTATE)
		return done;
	struct iovec *known = data, all = { registers, sizeof registers };
	if (syscall(SYS_ptrace, PTRACE_GETREGSET, pid, address, &all))
		return -1;
	if (all.iov_len < known->iov_len) {
		errno = EFAULT;
		return -1;
	}
	memcpy(registers, known->iov_base, known->iov_len);
	return syscall(SYS_ptrace, PTRACE_SETREGSET, pid, address, &all);
}
