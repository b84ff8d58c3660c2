import unittest

import stats


class MedianTest(unittest.TestCase):
    def test_odd_number_of_values(self):
        self.assertEqual(stats.median([5, 1, 3]), 3)

    def test_even_number_of_values(self):
        self.assertEqual(stats.median([4, 1, 3, 2]), 2.5)

    def test_no_values(self):
        with self.assertRaises(ValueError):
            stats.median([])

    def test_values_stay_as_they_are(self):
        values = [2, 1]
        stats.median(values)
        self.assertEqual(values, [2, 1])


if __name__ == "__main__":
    unittest.main()
