"""CUPTI, by which a process sees what it runs on GPUs: the binding, and the records that the library writes."""
