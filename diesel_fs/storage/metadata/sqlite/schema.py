"""The tables of the embedded metadata store, described once.

Numbers are never given out twice (AUTOINCREMENT), so that a number which another process remembers
never comes to mean something else. All bytes are opaque to SQLite; `record` is a `RECORD`, `tail` a
link's target or the `EXTENT`s of a file of several.

dataset  a marker; `digest` is 16 bytes, big-endian.
folder   names paths once: a folder's `parent` is another folder, the root's is 0. It says nothing
         about which folders exist: that is what entries are for.
chunk    what has been committed, and with which version.
entry    the state: the winning version of each path, tombstones too. `folder` and `name` are its
         path (the root's own entry has the root as its folder and an empty name); `chunk` holds it,
         or its extent number 0; `tail` has all extents, in order.
run      many entries of one folder and chunk in one row (`runs.py`): `names` joined by NUL,
         `records` one behind the other; a path is either here or in `entry`.
span     for an entry of several extents: the chunks that hold one.
part     extents of versions that are neither complete nor beaten by the entry that stands.
hole     places whose entry has been replaced or deleted.
hold     who holds commits back, and until when (seconds since 1970).
sync     a row to change where nothing but a sync is wanted.
aside    numbers whose rows are nobody's: being built (`beat`: when that was last said, in seconds
         since 1970), or to be removed (0). Made with its first row.
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
