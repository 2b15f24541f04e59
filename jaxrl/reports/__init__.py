"""Reports on runs, finished or in progress, as tables, curves, files and a page. Runs are read, never changed."""
