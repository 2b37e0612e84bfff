/* Reads files as a training job does: open, fstat, read to the end, close, one after the other.
 *
 *     reader [-w FOLDER] [-j READERS] [-b BATCH] LIST       LIST holds NUL-terminated paths
 *
 * With -w it first walks FOLDER, as a program does that lists its input. With -j, READERS processes
 * begin together and share the list: a process that is free takes the next BATCH paths, so that they
 * stay as near to each other as the workers of a DataLoader do.
 *
 * It prints as JSON the numbers of files and bytes, the sum of the bytes as 64-bit words (modulo
 * 2^64), the seconds from the first open to the last close, when that was (CLOCK_MONOTONIC), and the
 * number of entries of the walk. Any failure ends it with the path on stderr.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define READERS_MAX 64

struct tally {
    uint64_t files, bytes, sum;
    double start, end;
};

struct shared {
    _Atomic size_t next; /* the first path that nobody has taken */
    struct tally tallies[READERS_MAX];
};

static void fail(const char *path) {
    fprintf(stderr, "reader: %s: %s\n", path, strerror(errno));
    exit(1);
}

static double now(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (double)at.tv_sec + (double)at.tv_nsec / 1e9;
}

/* The whole file at `path`, in a buffer that is kept; its end is padded with zeros to 8 bytes. */
static size_t read_file(const char *path, char **buffer, size_t *room) {
    struct stat found;
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0 || fstat(file, &found) < 0) fail(path);
    size_t size = (size_t)found.st_size;
    if (size + 8 > *room) {
        *room = size + 8;
        free(*buffer);
        if (!(*buffer = malloc(*room))) fail(path);
    }
    size_t filled = 0;
    while (filled < size) {
        ssize_t count = read(file, *buffer + filled, size - filled);
        if (count < 0) fail(path);
        if (count == 0) {
            errno = ENODATA; /* shorter than it says */
            fail(path);
        }
        filled += (size_t)count;
    }
    memset(*buffer + size, 0, 8);
    if (close(file) < 0) fail(path);
    return size;
}

/* How many entries there are below `folder` (open, and closed here), by their types alone. */
static uint64_t walk(int folder, const char *name) {
    DIR *listed = folder < 0 ? NULL : fdopendir(folder);
    if (!listed) fail(name);
    uint64_t count = 0;
    for (struct dirent *entry; (errno = 0, entry = readdir(listed));) {
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..")) continue;
        count++;
        if (entry->d_type == DT_DIR) {
            int flags = O_RDONLY | O_DIRECTORY | O_CLOEXEC;
            count += walk(openat(dirfd(listed), entry->d_name, flags), entry->d_name);
        }
    }
    if (errno || closedir(listed) < 0) fail(name);
    return count;
}

static void read_batches(struct shared *shared, struct tally *tally, const char **paths,
                         size_t count, size_t batch) {
    char *content = NULL;
    size_t room = 0;
    tally->start = now();
    for (size_t at; (at = atomic_fetch_add(&shared->next, batch)) < count;) {
        size_t stop = count - at < batch ? count : at + batch;
        for (; at < stop; at++) {
            size_t size = read_file(paths[at], &content, &room);
            for (size_t place = 0; place < size; place += 8) {
                uint64_t word;
                memcpy(&word, content + place, 8);
                tally->sum += word;
            }
            tally->files++;
            tally->bytes += size;
        }
    }
    tally->end = now();
}

/* A process for each reader; they wait until all are there. */
static void fork_readers(struct shared *shared, size_t readers, const char **paths, size_t count,
                         size_t batch) {
    int gate[2];
    if (pipe(gate) < 0) fail("pipe");
    for (size_t reader = 0; reader < readers; reader++) {
        pid_t child = fork();
        if (child < 0) fail("fork");
        if (child) continue;
        char nothing;
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        close(gate[1]);
        if (read(gate[0], &nothing, 1) < 0) fail("pipe");
        read_batches(shared, &shared->tallies[reader], paths, count, batch);
        exit(0);
    }
    close(gate[1]);
    for (size_t reader = 0; reader < readers; reader++) {
        int status;
        if (wait(&status) < 0) fail("wait");
        if (status) exit(1); /* it has said why */
    }
}

int main(int argc, char **argv) {
    const char *folder = NULL;
    size_t readers = 1, batch = 64;
    for (int option; (option = getopt(argc, argv, "w:j:b:")) != -1;) {
        if (option == 'w') folder = optarg;
        else if (option == 'j') readers = strtoul(optarg, NULL, 10);
        else if (option == 'b') batch = strtoul(optarg, NULL, 10);
        else return 2;
    }
    if (optind != argc - 1 || readers < 1 || readers > READERS_MAX || batch < 1) {
        fprintf(stderr, "usage: reader [-w FOLDER] [-j READERS] [-b BATCH] LIST\n");
        return 2;
    }
    char *list = NULL;
    size_t list_room = 0, count = 0;
    size_t list_bytes = read_file(argv[optind], &list, &list_room);
    for (size_t at = 0; at < list_bytes; at++) count += !list[at];
    const char **paths = malloc((count + 1) * sizeof *paths);
    struct shared *shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE,
                                 MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (!paths || shared == MAP_FAILED) fail("memory");
    const char *path = list;
    for (size_t at = 0; at < count; at++, path += strlen(path) + 1) paths[at] = path;

    int flags = O_RDONLY | O_DIRECTORY | O_CLOEXEC;
    uint64_t walked = folder ? walk(open(folder, flags), folder) : 0;
    if (readers == 1) read_batches(shared, shared->tallies, paths, count, batch);
    else fork_readers(shared, readers, paths, count, batch);

    struct tally all = shared->tallies[0];
    for (const struct tally *one = shared->tallies + 1; one < shared->tallies + readers; one++) {
        all.files += one->files;
        all.bytes += one->bytes;
        all.sum += one->sum;
        if (one->start < all.start) all.start = one->start;
        if (one->end > all.end) all.end = one->end;
    }
    printf("{\"files\": %" PRIu64 ", \"bytes\": %" PRIu64 ", \"sum\": %" PRIu64
           ", \"seconds\": %.6f, \"end_s\": %.6f, \"walked\": %" PRIu64 "}\n",
           all.files, all.bytes, all.sum, all.end - all.start, all.end, walked);
    return 0;
}
