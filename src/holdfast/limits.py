"""Units of bytes, default sizes of blocks, and limits on requests, connections and leases."""

from __future__ import annotations

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

BLOCK_TOKENS = 128
"""Default tokens per block, where the engine's page allows it."""

SEGMENT_BLOCKS = 512
"""Default number of consecutive blocks of a chain that a pool places together."""

STRIPE_TARGETS = 9
"""Default of the most targets over which a segment is striped: eight blocks and their parity."""

STRIPE_TARGETS_MAX = 32

STRIPE_MEMBERS_MIN = 4
"""Fewest targets over which a segment is striped: of fewer, a parity record costs a half or more of
what it protects."""

PAYLOAD_BYTES_MAX = 256 * MIB
"""Largest payload of one block."""

LAYERS_MAX = 512
"""Maximum layers of a layout."""

GROUPS_MAX = 64
"""Maximum KV groups of one model."""

PART_RANGES_MAX = 2 * LAYERS_MAX
"""Maximum ranges of a payload that one writer fills: keys and values of each layer."""

CHAIN_BLOCKS_MAX = 65_536
"""Maximum keys in one request: 8 M tokens at 128 a block."""

PUBLIC_BLOCKS_MAX = 512
"""Leading blocks of a chain looked up in the public domain: 64K tokens at 128 a block."""

RESERVE_BLOCKS_MAX = 4_096
"""Maximum blocks in one reservation; other sessions wait while slots are allocated."""

RESERVATIONS_MAX = 4_096
"""Maximum open reservations of a session: neither committed nor aborted."""

RESERVED_BLOCKS_MAX = 4 * RESERVE_BLOCKS_MAX
"""Maximum blocks in a session's open reservations: 2 M tokens at 128 a block."""

LIST_KEYS_MAX = 4_096
"""Most keys in one page of a list."""

LIST_ROWS_MAX = 65_536
"""Most index rows that one page of a list looks at; a page may then have few keys, or none."""

FRAME_BODY_BYTES_MAX = 2 * MIB
"""Largest message body on a connection: 65,536 keys of 16 bytes, and other fields."""

FRAME_PAYLOAD_BYTES_MAX = PAYLOAD_BYTES_MAX + MIB
"""Largest raw payload behind one message: one largest record, or several smaller ones."""

CONNECTIONS_MAX = 1_024
"""Maximum connections that a node serves at once; of other nodes by default."""

TARGET_CONNECTIONS_MIN = 16
TARGET_CONNECTIONS_MAX = 16_384
"""Range of the option for connections of other nodes; each has a thread of the node."""

OBSERVED_MAX = 512
"""Maximum entries in each list of one timing report; an engine buffers half as many."""

IN_FLIGHT_MAX = 256
"""Maximum unanswered requests on one connection."""

HANDSHAKE_S = 5.0
"""Time for a new connection's first message; after it the connection is closed."""

HANDSHAKES_MAX = 128
"""Maximum connections whose first message has not arrived."""

BODY_S = 2.0
"""Time in which a message must arrive after its first byte; a payload has a minimum rate."""

IDLE_S = 300.0
"""A connection from another node without requests for this long is closed."""

PACE_S = 5.0
PACE_BYTES = 5 * 64 * KIB
"""Minimum rate of a payload: its transfer fails if fewer bytes move in `PACE_S` (64 KiB/s)."""

TOKEN_S_MAX = 600.0
"""Maximum lifetime of a token that admits a node to a target."""

RING_STALE_S = 60.0
"""A key ring that cannot be read for this long counts as one without keys."""

LEASE_S = 30.0
"""A lease that its holder does not release expires after this long."""

DAY_S = 86_400.0

DURABLE_S = 30 * DAY_S
"""Default time for which a context that was saved as durable is one, in seconds."""

WEEK_S = 7 * DAY_S
"""Default period in which every stored block is read and verified once."""

PARTIAL_S = 30.0
"""Time in which all parts of a block that several writers fill must have been committed."""

RECLAIM_S = 10.0
"""Slots that a lost engine may still write to are not reused for this long."""

FILL_S = RECLAIM_S / 2
"""Slots that were requested longer ago are not filled any more, but reserved again."""

LOCK_RECALL_S = 5.0
"""Time in which an engine gives page-locked memory back when asked; longer than a step."""

LOCK_START_S = 600.0
"""The same before an engine waits for recalls: it may load its model and capture graphs."""

LOCK_CHUNKS_MAX = 4_096
"""Maximum chunks in one message about page-locked memory: 256 GiB."""
