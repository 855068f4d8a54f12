"""Nothing of AITER: shows that the image installs what its stage has built."""
