"""CUPTI, the library by which a process traces its own work on GPUs: the binding, and the records that CUPTI writes."""
