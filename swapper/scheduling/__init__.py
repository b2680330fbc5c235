"""From a request to its end: queues, order, retries, deadlines, errors and statistics."""
