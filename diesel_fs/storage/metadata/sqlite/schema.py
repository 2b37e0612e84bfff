"""The tables of the SQLite metadata store.

`record` is a packed `RECORD`. `tail` is a link's target, or the `EXTENT`s of a file of several.
Numbers are never given out twice (AUTOINCREMENT), so a number that another process remembers
never means another row.

dataset  One row for each dataset: its head. `digest` is 16 bytes, big-endian.
folder   Gives each folder's path a number. `parent` is the number of another folder, or 0 for the
         root. A row does not mean that the folder exists: it may be left from deleted entries.
chunk    The committed chunks, and the version of the dataset at which each was committed.
entry    The state: the entry that wins at each path, tombstones too. `folder` and `name` are its
         path; the root's own entry has the root as its folder and an empty name. `chunk` holds the
         entry, or its extent number 0; `tail` has all extents, in order.
run      Many entries of one folder and chunk in one row (`runs.py`): `names` are joined by NUL
         bytes, `records` are concatenated. A path is either here or in `entry`.
span     For an entry of several extents: each chunk that holds one of them.
part     Extents of files of which some extents have not been committed yet, as long as their stamp
         is greater than that of the path's entry.
hole     Places of entries that were replaced or deleted.
hold     Commit locks: until when (seconds since 1970) a dataset takes no commits.
sync     One number, changed by `sync`, since a transaction that changes nothing is not synced.
aside    Dataset numbers of rows that belong to no dataset. `beat` is the time of the last heartbeat
         of the rebuild that writes the rows (seconds since 1970), or 0 if they are to be removed.
         This table is made when it is first needed.
"""

APPLICATION_ID = 0x4453454C  # "DSEL"
SCHEMA_VERSION = 1

SCHEMA = """
CREATE TABLE dataset (
    number INTEGER PRIMARY KEY AUTOINCREMENT, identity BLOB NOT NULL UNIQUE,
    name TEXT NOT NULL UNIQUE, version INTEGER NOT NULL, files INTEGER NOT NULL,
    bytes INTEGER NOT NULL, chunks INTEGER NOT NULL, digest BLOB NOT NULL, newest BLOB NOT NULL
);
CREATE TABLE folder (
    number INTEGER PRIMARY KEY AUTOINCREMENT, dataset INTEGER NOT NULL, parent INTEGER NOT NULL,
    name BLOB NOT NULL, UNIQUE (dataset, parent, name)
);
CREATE TABLE chunk (
    number INTEGER PRIMARY KEY AUTOINCREMENT, dataset INTEGER NOT NULL, id BLOB NOT NULL,
    object_bytes INTEGER NOT NULL, uploaded_ns INTEGER NOT NULL, entries INTEGER NOT NULL,
    version INTEGER NOT NULL, UNIQUE (dataset, id)
);
CREATE TABLE entry (
    folder INTEGER NOT NULL, name BLOB NOT NULL, stamp BLOB NOT NULL, chunk INTEGER NOT NULL,
    record BLOB NOT NULL CHECK (length(record) = 48), tail BLOB,
    PRIMARY KEY (folder, name)
) WITHOUT ROWID;
CREATE INDEX entry_by_chunk ON entry (chunk);
CREATE TABLE span (
    chunk INTEGER NOT NULL, folder INTEGER NOT NULL, name BLOB NOT NULL,
    PRIMARY KEY (chunk, folder, name)
) WITHOUT ROWID;
CREATE TABLE part (
    folder INTEGER NOT NULL, name BLOB NOT NULL, stamp BLOB NOT NULL, number INTEGER NOT NULL,
    chunk INTEGER NOT NULL, record BLOB NOT NULL CHECK (length(record) = 48),
    extent BLOB NOT NULL CHECK (length(extent) = 64),
    PRIMARY KEY (folder, name, stamp, number)
) WITHOUT ROWID;
CREATE TABLE run (
    number INTEGER PRIMARY KEY, folder INTEGER NOT NULL, first BLOB NOT NULL, last BLOB NOT NULL,
    chunk INTEGER NOT NULL, names BLOB NOT NULL, records BLOB NOT NULL
);
CREATE UNIQUE INDEX run_by_folder ON run (folder, first, last);
CREATE INDEX run_by_chunk ON run (chunk);
CREATE TABLE hole (
    chunk INTEGER NOT NULL, place INTEGER NOT NULL, PRIMARY KEY (chunk, place)
) WITHOUT ROWID;
CREATE TABLE hold (token BLOB PRIMARY KEY, dataset INTEGER NOT NULL, until REAL NOT NULL);
CREATE TABLE sync (count INTEGER NOT NULL);
INSERT INTO sync VALUES (0);
"""

SHADOW_TABLE = "CREATE TABLE IF NOT EXISTS aside (dataset INTEGER PRIMARY KEY, beat REAL NOT NULL)"
