# SPDX-License-Identifier: Apache-2.0
"""One module for each fix in this build; written when the build is made."""
