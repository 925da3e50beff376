package card

import "regexp"

// HostImage is the image that is there without being imported: the machine's own programs, read-only.
const HostImage = "host"

// HostWritable is HostImage below a throw-away layer, in which the kid is root and may install packages.
const HostWritable = "host+writable"

var imageRE = regexp.MustCompile(`^[a-z][a-z0-9._-]{0,62}$`)

// NamesImage says whether an imported image can have that name. Whether there is one, its box knows.
func NamesImage(name string) bool { return name != HostImage && imageRE.MatchString(name) }
