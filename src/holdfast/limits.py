"""A limit on everything: sizes, counts and times that no peer may exceed."""

from __future__ import annotations

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

BLOCK_TOKENS = 128
"""Default tokens per block, where the engine's page allows it."""

SEGMENT_BLOCKS = 512
"""Blocks of a chain that are placed together on a pool node, where nobody says otherwise."""

PAYLOAD_BYTES_MAX = 256 * MIB
"""Largest payload of one block."""

CHAIN_BLOCKS_MAX = 65_536
"""Most keys in one request: 8 M tokens at 128 a block."""

RESERVE_BLOCKS_MAX = 4_096
"""Most blocks that one request finds room for: all sessions wait while it does."""

TICKETS_MAX = 4_096
"""Most tickets of a session that are neither committed nor given back."""

TICKET_BLOCKS_MAX = 4 * RESERVE_BLOCKS_MAX
"""Most blocks in all of them: 2 M tokens at 128 a block."""

FRAME_BODY_BYTES_MAX = 2 * MIB
"""Largest message body on a connection (65,536 keys of 16 bytes, and room)."""

FRAME_PAYLOAD_BYTES_MAX = PAYLOAD_BYTES_MAX + MIB
"""Largest raw payload behind one message: one largest record, or several smaller ones."""

CONNECTIONS_MAX = 1_024
"""Most connections a node serves at once."""

OBSERVED_MAX = 512
"""Most steps, and most endings, that one message tells: an engine keeps half as many."""

IN_FLIGHT_MAX = 256
"""Most unanswered requests on one connection."""

HANDSHAKE_S = 5.0
"""A connection that has not said hello by then is closed."""

HANDSHAKES_MAX = 128
"""Most connections that have not said hello yet."""

BODY_S = 2.0
"""A message that has begun must be whole by then; its payload has a pace instead."""

IDLE_S = 300.0
"""A connection from another node that asks nothing for this long is closed."""

PACE_S = 5.0
PACE_BYTES = 5 * 64 * KIB
"""A payload that moves fewer bytes than this in `PACE_S` is given up: 64 KiB/s."""

TOKEN_S_MAX = 600.0
"""A token that lets a node in is valid for this long at most."""

RING_STALE_S = 60.0
"""A key ring that could not be read for this long is taken for one that lost its keys."""

LEASE_S = 30.0
"""A lease nobody released is taken back after this long."""

WEEK_S = 7 * 86_400.0
"""All that is stored is read and verified once in this time, if nobody says otherwise."""

RECLAIM_S = 10.0
"""Slots a vanished engine might still be writing to rest this long before reuse."""
