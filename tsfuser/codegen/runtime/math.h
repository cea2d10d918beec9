// Mathematical functions (placeholder).
#pragma once

#include "types.h"
