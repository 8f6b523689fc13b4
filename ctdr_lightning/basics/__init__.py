"""Words, files, errors and checks that everything else uses; no models, no traces."""
