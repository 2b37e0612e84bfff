/* Stops a program before each call that changes what a disk will hold after a power cut, or turns
 * such calls into nothing. Preloaded into the programs under test.
 *
 * POWERCUT_STEPS=DIR     before each call writes "@step N call" to the console and waits until
 *                        DIR/N is there. One lock for all processes (in /run, which is memory), so
 *                        that nothing else gets to the disk meanwhile.
 * POWERCUT_SKIP=files    fsync and fdatasync of files succeed and do nothing; of folders: `folders`;
 *                        of both: `all`.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

static int before(const char *call)
{
	const char *folder = getenv("POWERCUT_STEPS");
	if (!folder)
		return -1;
	int lock = open("/run/steps", O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	if (lock < 0 || flock(lock, LOCK_EX))
		abort();
	char text[4096] = "";
	if (pread(lock, text, 20, 0) < 0)
		abort();
	int number = atoi(text) + 1;
	int length = snprintf(text, sizeof text, "%d\n", number);
	if (pwrite(lock, text, length, 0) != length)
		abort();
	int console = open("/dev/console", O_WRONLY | O_NOCTTY | O_CLOEXEC);
	length = snprintf(text, sizeof text, "@step %d %s\n", number, call);
	if (write(console, text, length) != length)
		abort();
	close(console);
	snprintf(text, sizeof text, "%s/%d", folder, number);
	while (access(text, F_OK))
		usleep(1000);
	return lock;
}

static void after(int lock)
{
	int error = errno;
	if (lock >= 0)
		close(lock);
	errno = error;
}

static int skipped(int fd)
{
	const char *which = getenv("POWERCUT_SKIP");
	struct stat found;
	if (!which || fstat(fd, &found))
		return 0;
	return !strcmp(which, "all") || !strcmp(which, S_ISDIR(found.st_mode) ? "folders" : "files");
}

/* The wrapper of a call: `declared` and `given` are its parameters with and without types. */
#define STEP(call, nothing_to_do, declared, given)                     \
	int call declared                                              \
	{                                                              \
		static int(*real) declared;                            \
		if (!real)                                             \
			real = (int(*) declared)dlsym(RTLD_NEXT, #call); \
		if (nothing_to_do)                                     \
			return 0;                                      \
		int lock = before(#call);                              \
		int done = real given;                                 \
		after(lock);                                           \
		return done;                                           \
	}

STEP(fsync, skipped(fd), (int fd), (fd))
STEP(fdatasync, skipped(fd), (int fd), (fd))
STEP(link, 0, (const char *from, const char *to), (from, to))
STEP(linkat, 0, (int at, const char *from, int to_at, const char *to, int flags),
     (at, from, to_at, to, flags))
STEP(rename, 0, (const char *from, const char *to), (from, to))
STEP(renameat, 0, (int at, const char *from, int to_at, const char *to), (at, from, to_at, to))
STEP(unlink, 0, (const char *path), (path))
STEP(unlinkat, 0, (int at, const char *path, int flags), (at, path, flags))
