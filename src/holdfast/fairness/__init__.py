"""Fair sharing of a resource between domains: weighted queues, shares and thread pools."""
