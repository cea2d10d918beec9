// Which functions of the C library have vector versions.
#pragma once
