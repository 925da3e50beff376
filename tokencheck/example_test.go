package tokencheck_test

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"tagout/tokencheck"
)

// A service lets requests pass that carry a token for it with the right scope. How fresh the issuer's word must be is the
// service's choice: here it asks at every use, so that a revoked session is refused at its next request.
func ExampleChecker_Require() {
	w := newWorld(&testing.T{}) // stands for a box; its own services take what the box's configuration says
	defer w.srv.Close()

	checker, err := tokencheck.New(tokencheck.Config{
		Issuer:   w.srv.URL, // https://issuer.example.com
		Audience: "https://books.own.test",
		Key:      "tgk_service", // what `tagout issuer client add books --role introspect` printed
		Now:      w.now,
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	books := http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		claims, _ := tokencheck.FromContext(r.Context())
		fmt.Fprintf(rw, "three books for kid %s of card %s", claims.Kid, claims.Card)
	})
	handler := checker.Require("books:read")(books)

	call := func(token string) {
		r := httptest.NewRequest("GET", "/books", nil)
		r.Header.Set("Authorization", "Bearer "+token)
		answer := httptest.NewRecorder()
		handler.ServeHTTP(answer, r)
		fmt.Println(answer.Code, answer.Body)
	}
	token, session := w.token()
	call(token)
	w.revoke(session)
	call(token)
	// Output:
	// 200 three books for kid k of card c
	// 401 the token is not active
}

// Where a question at every use is too much, a status list serves all tokens: a revoked one is refused after MaxStale at
// the latest, and the issuer does not learn who uses what.
func ExampleChecker_Check() {
	w := newWorld(&testing.T{}) // stands for a box
	defer w.srv.Close()

	checker, err := tokencheck.New(tokencheck.Config{
		Issuer: w.srv.URL, Audience: "https://books.own.test", How: tokencheck.StatusList, MaxStale: 10 * time.Second,
		Now: w.now,
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	token, _ := w.token()
	claims, err := checker.Check(context.Background(), token, "books:write")
	fmt.Println(claims, err)
	// Output:
	// <nil> the token's scope does not cover this: it has not "books:write"
}
