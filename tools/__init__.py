"""Scripts of the build and of CI. Not installed with the package."""
