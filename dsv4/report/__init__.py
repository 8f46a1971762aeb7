"""The report: one offline HTML page from an audit's artefacts, never from a live run."""
