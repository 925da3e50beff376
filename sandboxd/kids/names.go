package kids

import (
	"crypto/rand"
	"fmt"
	"math/big"
)

// Words for names that people can read out over a phone.
var (
	adjectives = []string{"amber", "bold", "brisk", "calm", "clear", "crisp", "dapper", "early", "even", "fair", "fond", "gentle", "glad", "green",
		"handy", "keen", "kind", "late", "light", "lucid", "mellow", "mild", "neat", "nimble", "noble", "plain", "plucky", "polite", "prime", "proud",
		"quick", "quiet", "rapid", "ready", "rustic", "sage", "sharp", "sleek", "smart", "solid", "spry", "steady", "still", "stout", "sunny", "swift",
		"tidy", "trusty", "vivid", "warm", "wise", "witty"}
	animals = []string{"badger", "beaver", "bison", "crane", "curlew", "deer", "dove", "eagle", "egret", "falcon", "ferret", "finch", "fox", "gecko",
		"goose", "hare", "hawk", "heron", "ibis", "jackal", "jay", "kestrel", "lark", "lemur", "lynx", "marten", "mole", "moose", "newt", "ocelot",
		"osprey", "otter", "owl", "panda", "pika", "plover", "puffin", "quail", "rabbit", "raven", "robin", "seal", "shrew", "stoat", "stork", "swan",
		"tapir", "tern", "toad", "vole", "weasel", "wren"}
)

// makeUpName returns a readable name; attempts after the first get a number, in case all plain ones are taken.
func makeUpName(attempt int) string {
	name := pick(adjectives) + "-" + pick(animals)
	if attempt > 0 {
		name += fmt.Sprintf("-%d", random(1000))
	}
	return name
}

func pick(words []string) string { return words[random(len(words))] }

func random(n int) int {
	i, err := rand.Int(rand.Reader, big.NewInt(int64(n)))
	if err != nil { // crypto/rand never fails on Linux; 0 is a fine word
		return 0
	}
	return int(i.Int64())
}
