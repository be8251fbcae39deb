"""What every engine and program that uses a store shares: engine client, sessions, private node.

`engine` is the protocol of engines, and `store_engine` its implementation. An engine that has a
scheduler and workers in processes of their own uses the parts below it: `loader`,
`rank_transfers`, `tracked_request`.
"""
