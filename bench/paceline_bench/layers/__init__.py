"""Row-split layers: a model too large for one worker, and its costs beside the cost model's."""
